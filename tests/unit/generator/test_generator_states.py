"""The generator's state machine is the contract's table."""

from __future__ import annotations

import pytest

from services.generator.machine import IDLE, TABLE
from shared.participant.machine import IllegalTransition, Machine

STATES = ("IDLE", "RECEIVING", "GENERATING", "DISPATCHING_TOOL", "WAITING_FOR_TOOL", "PUBLISHING", "ERROR")

CONTRACT = {
    ("IDLE", "RECEIVE", "RECEIVING"),
    ("RECEIVING", "START_GENERATION", "GENERATING"),
    ("GENERATING", "DISPATCH_TOOL", "DISPATCHING_TOOL"),
    ("DISPATCHING_TOOL", "AWAIT_TOOL", "WAITING_FOR_TOOL"),
    ("WAITING_FOR_TOOL", "TOOL_RESULT", "GENERATING"),
    ("WAITING_FOR_TOOL", "TOOL_TIMEOUT", "GENERATING"),
    ("GENERATING", "PUBLISH", "PUBLISHING"),
    ("PUBLISHING", "RESET", "IDLE"),
    *((state, "FAIL", "ERROR") for state in STATES if state != "IDLE"),
    ("ERROR", "RESET", "IDLE"),
}


def test_the_table_has_exactly_the_contracts_transitions() -> None:
    assert {(before, action, after) for (before, action), after in TABLE.items()} == CONTRACT


@pytest.mark.parametrize("state", STATES)
def test_every_other_action_is_a_bug_and_changes_nothing(state: str) -> None:
    actions = {action for _, action, _ in CONTRACT}
    allowed = {action for before, action, _ in CONTRACT if before == state}
    for action in actions - allowed:
        machine = Machine(TABLE, state)
        with pytest.raises(IllegalTransition):
            machine.step(action)
        assert machine.state == state


def test_a_step_tells_where_it_came_from_and_where_it_went() -> None:
    step = Machine(TABLE, IDLE).step("RECEIVE")
    assert (step.before, step.action, step.after) == ("IDLE", "RECEIVE", "RECEIVING")
