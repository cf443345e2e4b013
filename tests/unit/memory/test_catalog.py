"""The catalog against a plain list."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from services.memory.catalog import Catalog
from services.memory.engram import Engram

names, users = st.sampled_from("abcdef"), st.sampled_from(["ann", "bob"])
steps = st.lists(st.tuples(st.sampled_from(["add", "remove", "drop"]), users, names, st.integers(0, 3)), max_size=40)


@given(steps, st.integers(1, 4))
def test_a_catalog_lists_what_was_added_and_not_removed_newest_first(found: list[Any], size: int) -> None:
    catalog, model = Catalog(), dict[tuple[str, str], int]()
    for action, user, name, time in found:
        engram_id = f"{user}-{name}"
        if action == "add":
            kind: Any = "note" if name in "ab" else "turn"
            respondent = "B" if name in "bc" else ""
            engram = Engram(engram_id, user, kind, time, time, respondent_id=respondent)
            catalog.add([engram])
            model[user, engram_id] = time
        elif action == "remove":
            catalog.remove(user, [engram_id])
            model.pop((user, engram_id), None)
        else:
            catalog.remove_user(user)
            model = {key: value for key, value in model.items() if key[0] != user}
    assert len(catalog) == len(model)
    for user in ("ann", "bob"):
        expected = sorted(((time, one) for (who, one), time in model.items() if who == user), reverse=True)
        pages: list[tuple[int, str]] = []
        while page := catalog.newest(user, size, pages[-1] if pages else None):
            pages += page
        assert pages == expected
        assert catalog.count(user) == len(expected)
        assert all(catalog.owner(one) == user for _, one in expected)
        assert catalog.hidden(user) == {one for _, one in expected if one[-1] in "bc"}
    for asked in (False, True):
        times = {key: time for key, time in model.items() if (key[1][-1] in "ab") == asked}
        for user in ("ann", "bob"):
            old = sorted((time, one) for (who, one), time in times.items() if who == user and time < 2)
            assert catalog.oldest(user, size, asked=asked, before=2) == [one for _, one in old][:size]
        due = sum(time < 2 for time in times.values())
        assert catalog.census(asked=asked, before=2) == (len(times), min(times.values(), default=None), due)
