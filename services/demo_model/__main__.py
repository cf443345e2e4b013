from services.demo_model.service import main

raise SystemExit(main())
