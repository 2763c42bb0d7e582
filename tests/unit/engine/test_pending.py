"""Recomputed values that wait: the last recompute's survive their backward, all others go (R26)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch

import ckptdeco
from ckptdeco.engine import pending
from ckptdeco.engine.torch_private import graph_task_id


class FakeCall:
    """What `pending` knows of a layer call."""

    is_alone = False

    def __init__(self, n_references: int = 0) -> None:
        self.waiting: dict[int, object] = {}
        self.rebuilt: dict[int, object] = {}
        self.n_references = n_references

    def references(self) -> list[int]:
        return [0] * self.n_references

    def wait(self) -> None:
        task = graph_task_id()
        self.waiting[task] = {0: "value"}
        pending.note(task, self)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    pending.forget()
    pending._calls.clear()  # what an earlier test left, whose backward never ended
    yield
    pending.forget()
    assert pending._calls == {}
    assert pending._leftover == []


def backward(action: Callable[[], None]) -> None:
    x = torch.randn(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda grad: action())
    y.sum().backward()


def test_values_of_a_call_in_no_chain_are_not_left() -> None:
    call = FakeCall()
    call.is_alone = True
    backward(call.wait)
    assert call.waiting == {}


def test_values_of_the_last_recompute_are_left() -> None:
    first, second = FakeCall(), FakeCall()

    def action() -> None:
        first.wait()
        second.wait()

    backward(action)
    assert first.waiting == {}
    assert list(second.waiting) == [pending.LEFTOVER]


def test_all_calls_of_the_last_walk_are_left() -> None:
    """A walk begins at the call whose inputs are all kept."""
    before, head, middle, target = FakeCall(), FakeCall(), FakeCall(1), FakeCall(1)

    def action() -> None:
        for call in (before, head, middle, target):
            call.wait()

    backward(action)
    assert before.waiting == {}
    assert all(list(call.waiting) == [pending.LEFTOVER] for call in (head, middle, target))


def test_leftover_goes_when_asked() -> None:
    call = FakeCall()
    backward(call.wait)
    pending.drop_leftover()
    assert call.waiting == {}


def test_leftover_goes_when_a_policy_is_left() -> None:
    call = FakeCall()
    with ckptdeco.policy(segment=1):
        backward(call.wait)
        assert list(call.waiting) == [pending.LEFTOVER]
    assert call.waiting == {}


def test_leftover_goes_when_another_recompute_starts() -> None:
    first, second = FakeCall(), FakeCall()

    def recompute() -> None:
        pending.drop_leftover()
        second.wait()

    backward(first.wait)
    backward(recompute)
    assert first.waiting == {}
    assert list(second.waiting) == [pending.LEFTOVER]


def test_leftover_stays_when_a_backward_without_a_recompute_ends() -> None:
    """R26: gradients layer by layer ask for more of it each time."""
    first, second = FakeCall(), FakeCall()
    backward(first.wait)
    backward(second.wait)
    assert list(first.waiting) == list(second.waiting) == [pending.LEFTOVER]


def test_values_of_a_backward_that_failed_go_with_the_next_forward() -> None:
    call = FakeCall()

    def action() -> None:
        call.wait()
        call.rebuilt[graph_task_id()] = "input"
        raise KeyError("of the user")

    with pytest.raises(KeyError):
        backward(action)
    pending.forget()
    assert call.waiting == {}
    assert call.rebuilt == {}


def test_nothing_that_runs_is_forgotten() -> None:
    call = FakeCall()
    seen = []

    def action() -> None:
        call.wait()
        pending.forget()
        seen.append(list(call.waiting) == [graph_task_id()])

    backward(action)
    assert seen == [True]


def test_outside_of_a_backward_nothing_is_noted() -> None:
    pending.note(-1, FakeCall())  # type: ignore[arg-type]
    assert pending._calls == {}


def test_calls_are_held_weakly() -> None:
    gone = []

    def action() -> None:
        call = FakeCall()
        call.wait()
        gone.append(weakref.ref(call))

    backward(action)
    gc.collect()
    assert gone[0]() is None
