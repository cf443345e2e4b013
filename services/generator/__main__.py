import sys

from services.generator.service import service
from shared.errors import SettingsError

try:
    service().main()
except SettingsError as exc:
    print(f"local2: {exc}", file=sys.stderr)
    sys.exit(2)
