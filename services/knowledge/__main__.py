from services.knowledge.service import app

app.main()
