import sys

from services.generator.service import service
from shared.errors import SettingsError

try:
    service().main()
except SettingsError as exc:
    sys.exit(f"local2: {exc}")
