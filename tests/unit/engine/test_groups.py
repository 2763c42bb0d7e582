"""Backward passes of one `GraphExecGroup` have one number, and its values go with it."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import GraphExecGroup

from ckptdeco.engine import groups, pending
from ckptdeco.engine.groups import check_overlap, is_group, pass_id
from ckptdeco.errors import GroupOverlapError


def in_backward(action: Any) -> None:
    x = torch.randn(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda grad: action())
    y.sum().backward()


def ids(n: int) -> list[int]:
    seen: list[int] = []
    for _ in range(n):
        in_backward(lambda: seen.append(pass_id()))
    return seen


def test_outside_of_a_group_each_backward_has_a_number_of_its_own() -> None:
    one, two = ids(2)
    assert one != two
    assert not is_group(one)
    assert pass_id() == -1


def test_backward_passes_of_a_group_have_one_number() -> None:
    with GraphExecGroup():
        one, two = ids(2)
        assert pass_id() == -1
    with GraphExecGroup():
        (other,) = ids(1)
    assert one == two != other
    assert is_group(one)
    assert is_group(other)
    reserved = (pending.LEFTOVER, -1, -2, -4)
    assert not any(map(is_group, reserved))


class FakeCall:
    info = type("Info", (), {"label": "layer"})

    def __init__(self) -> None:
        self.waiting: dict[int, object] = {}
        self.rebuilt: dict[int, object] = {}

    def wait(self) -> None:
        task = pass_id()
        self.waiting[task] = self.rebuilt[task] = "value"
        pending.note(task, self)  # type: ignore[arg-type]


def test_values_go_when_the_group_does() -> None:
    call = FakeCall()
    group: Any = GraphExecGroup()
    with group:
        in_backward(call.wait)
    pending.forget()
    assert len(call.waiting) == len(call.rebuilt) == 1
    del group
    gc.collect()
    assert call.waiting == call.rebuilt == {}
    assert groups._calls == {}


def test_second_pass_that_asks_for_the_same_overlaps() -> None:
    saved = type("Saved", (), {"task": -2, "group_task": -2, "index": 3})()
    call: Any = FakeCall()

    def ask() -> None:
        check_overlap(call, saved, pass_id())
        saved.task = pass_id()

    def ask_twice() -> None:
        ask()
        ask()

    with GraphExecGroup():
        in_backward(ask_twice)
        with pytest.raises(GroupOverlapError, match="saved tensor 3 of layer"):
            in_backward(ask)
    with GraphExecGroup():
        in_backward(ask)
