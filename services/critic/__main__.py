from services.critic.service import app

app.main()
