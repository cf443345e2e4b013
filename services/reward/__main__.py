from services.reward.service import app

app.main()
