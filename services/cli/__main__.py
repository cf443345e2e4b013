from services.cli.app import main

main()
