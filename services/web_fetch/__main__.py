from services.web_fetch.service import app

app.main()
