"""What two or more participants need: the bus, the journal, the service and tool runtimes, the model port."""

import sys

# httpx loads its own command line along, where the packages for it are there: five megabytes in every process
sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
