"""A state machine is a table; this checks it and shows each step. The order of work stays the order of statements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

Table = Mapping[tuple[str, str], str]


class IllegalTransition(AssertionError):
    """The program did something that its table does not allow: a bug."""


@dataclass(frozen=True, slots=True)
class Transition:
    before: str
    action: str
    after: str


class Machine:
    """The state of one query. `table` maps (state, action) to the next state."""

    def __init__(self, table: Table, initial: str) -> None:
        self._table = table
        self.state = initial

    def step(self, action: str) -> Transition:
        """Raises IllegalTransition; the state is unchanged then."""
        after = self._table.get((self.state, action))
        if after is None:
            raise IllegalTransition(f"{action} is not possible in {self.state}")
        transition = Transition(self.state, action, after)
        self.state = after
        return transition
