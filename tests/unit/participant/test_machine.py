"""State machines: the table decides, and says so when the program is wrong."""

from __future__ import annotations

import pytest

from shared.participant.machine import IllegalTransition, Machine, Transition

TABLE = {("IDLE", "RECEIVE"): "RECEIVING", ("RECEIVING", "RESET"): "IDLE"}


def test_a_step_follows_the_table_and_tells_what_it_did() -> None:
    machine = Machine(TABLE, "IDLE")
    assert machine.step("RECEIVE") == Transition("IDLE", "RECEIVE", "RECEIVING")
    assert machine.step("RESET") == Transition("RECEIVING", "RESET", "IDLE")
    assert machine.state == "IDLE"


def test_an_illegal_step_raises_and_changes_nothing() -> None:
    machine = Machine(TABLE, "IDLE")
    with pytest.raises(IllegalTransition, match="RESET is not possible in IDLE"):
        machine.step("RESET")
    assert machine.state == "IDLE"


def test_an_illegal_transition_is_a_bug_not_a_condition() -> None:
    assert issubclass(IllegalTransition, AssertionError)
