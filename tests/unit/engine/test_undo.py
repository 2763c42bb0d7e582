"""What was registered is brought back, last first, whatever fails on the way."""

from __future__ import annotations

import pytest

from ckptdeco.engine.undo import Undo


def test_last_change_is_undone_first() -> None:
    seen: list[int] = []
    undo = Undo([lambda: seen.append(1), lambda: seen.append(2)])
    undo.run()
    assert seen == [2, 1]
    assert not undo


def test_action_that_was_interrupted_is_run_again() -> None:
    seen: list[str] = []

    def act() -> None:
        seen.append("act")
        if len(seen) == 1:
            raise KeyboardInterrupt

    undo = Undo([lambda: seen.append("first"), act])
    with pytest.raises(KeyboardInterrupt):
        undo.run()
    undo.insist()
    assert seen == ["act", "act", "first"]


def test_action_that_fails_keeps_no_other_from_running() -> None:
    seen: list[int] = []

    def fail() -> None:
        raise ZeroDivisionError

    undo = Undo([lambda: seen.append(1), fail, lambda: seen.append(2)])
    with pytest.raises(ZeroDivisionError):
        undo.insist()
    assert seen == [2, 1]
