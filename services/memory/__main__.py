from services.memory.service import app

app.main()
