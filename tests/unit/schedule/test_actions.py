"""The vocabulary of schedules and events."""

import dataclasses

import pytest

from ckptdeco.schedule import Action, Dropped, Freed, Kept, Recomputed


def test_actions_show_as_the_code_that_names_them():
    assert repr(Action.DROP_KEEP) == "Action.DROP_KEEP"
    assert [action.value for action in Action] == ["save", "drop_keep", "drop"]


@pytest.mark.parametrize("event", [Kept(1, 8), Dropped(1, 8), Recomputed(1), Freed(1, 8)])
def test_events_are_frozen_values(event):
    assert event == dataclasses.replace(event)
    assert hash(event) == hash(dataclasses.replace(event))
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.call = 2
    assert not hasattr(event, "__dict__")


def test_events_of_different_kinds_differ():
    assert Kept(1, 8) != Freed(1, 8)
