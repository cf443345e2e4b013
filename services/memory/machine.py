"""The states of one message at memory."""

from shared.participant.machine import Table

IDLE, INGESTING, ANNOTATING, ANNOTATING_PAIRWISE, ERROR = (
    "IDLE",
    "INGESTING",
    "ANNOTATING",
    "ANNOTATING_PAIRWISE",
    "ERROR",
)

_BUSY = (INGESTING, ANNOTATING, ANNOTATING_PAIRWISE)

TABLE: Table = {
    (IDLE, "INGEST"): INGESTING,
    (IDLE, "ANNOTATE"): ANNOTATING,
    (IDLE, "ANNOTATE_PAIRWISE"): ANNOTATING_PAIRWISE,
    **{(state, "DONE"): IDLE for state in _BUSY},
    **{(state, "FAIL"): ERROR for state in _BUSY},
    (ERROR, "RESET"): IDLE,
}
