from services.web_search.service import app

app.main()
