from services.mcp.service import app

app.main()
