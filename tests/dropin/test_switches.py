"""Contract 9 and 11: early stop and debugging, by keyword and by torch's context managers, read at forward."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import set_checkpoint_debug_enabled, set_checkpoint_early_stop

import ckptdeco
from ckptdeco import CheckpointError, checkpoint
from tests.dropin.comparing import N_CALLS, leaves

STOPPED, COMPLETE = 1, 2
"""How often the code after the last saved tensor runs in one step."""


class Tail:
    """Counts how often the code after the last saved tensor runs."""

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, x: Tensor) -> Tensor:
        y = x.sin().cos()
        tail.n += 1
        return y.clone()


tail = Tail()  # a global: attributes and closures are put back after a recompute


def runs_of_the_tail(keyword: dict[str, bool], switches: list[bool], call: Any = checkpoint) -> int:
    (x,) = leaves((3,))
    tail.n = 0
    with contextlib.ExitStack() as stack:
        for value in switches:
            stack.enter_context(set_checkpoint_early_stop(value))
        out = call(lambda x: tail(x), x, **keyword)
    out.sum().backward()
    return tail.n


@pytest.mark.parametrize(
    ("keyword", "switches", "runs"),
    [
        ({}, [], STOPPED),
        ({"early_stop": False}, [], COMPLETE),
        ({"early_stop": True}, [], STOPPED),
        ({}, [False], COMPLETE),
        ({}, [True], STOPPED),
        ({"early_stop": True}, [False], COMPLETE),
        ({"early_stop": False}, [True], STOPPED),
        ({"early_stop": False}, [False, True], STOPPED),
        ({"early_stop": True}, [True, False], COMPLETE),
    ],
)
def test_early_stop_by_keyword_and_switch(keyword: dict[str, bool], switches: list[bool], runs: int) -> None:
    for _ in range(N_CALLS):
        assert runs_of_the_tail(keyword, switches) == runs


def test_the_switch_around_backward_changes_nothing() -> None:
    (x,) = leaves((3,))
    tail.n = 0
    out = checkpoint(tail, x)
    with set_checkpoint_early_stop(False):
        out.sum().backward()
    assert tail.n == STOPPED


@pytest.mark.parametrize("inner", [checkpoint, lambda f, x: torch_checkpoint(f, x, use_reentrant=False)])
def test_calls_inside_a_recompute_see_the_switch_of_forward(inner: Any) -> None:
    """The inner call of the recompute is made when the switch is long gone."""
    for switch, runs in ((False, 3), (True, 2)):  # forward, recompute of the outer call, of the inner call
        (x,) = leaves((3,))
        tail.n = 0
        with set_checkpoint_early_stop(switch):
            out = checkpoint(lambda x: inner(lambda y: tail(y), x).exp(), x)
        with set_checkpoint_early_stop(not switch):
            out.sum().backward()
        assert tail.n == runs


def test_the_switch_holds_for_decorated_layers_too() -> None:
    layer = ckptdeco.checkpointable(lambda x: tail(x))
    for option in (True, False):
        for switch, runs in ((None, STOPPED if option else COMPLETE), (True, STOPPED), (False, COMPLETE)):
            (x,) = leaves((3,))
            tail.n = 0
            with set_checkpoint_early_stop(switch), ckptdeco.policy(segment=1, early_stop=option):  # type: ignore[arg-type]
                out = layer(x)
            out.sum().backward()
            assert tail.n == runs, (option, switch)


def test_the_stop_unwinds_through_finally_and_context_managers() -> None:
    events: list[str] = []

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            events.append("in")
            try:
                with contextlib.ExitStack() as stack:
                    stack.callback(events.append, "stack")
                    return (x * x).exp().clone()
            finally:
                events.append("finally")

    for _ in range(N_CALLS):
        events.clear()
        (x,) = leaves((3,))
        checkpoint(Layer(), x).sum().backward()
        assert events == ["in", "stack", "finally"] * 2


def hooked(takes_part: bool, events: list[str]) -> nn.Module:
    layer = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    layer[0].register_forward_pre_hook(lambda module, args: events.append("pre") or (args if takes_part else None))
    layer[1].register_forward_hook(lambda *args: events.append("post"), always_call=True)
    return layer


def test_module_hooks_inside_that_only_watch_fire_as_in_the_plain_run() -> None:
    events: list[str] = []
    layer = hooked(False, events)
    for _ in range(N_CALLS):
        events.clear()
        checkpoint(layer, *leaves((2, 3))).sum().backward()
        assert events == ["pre", "post"]


def test_module_hooks_inside_that_take_part_fire_again_and_the_stop_unwinds_through_them() -> None:
    events: list[str] = []
    layer = hooked(True, events)
    for _ in range(N_CALLS):
        seen = []
        for call in (checkpoint, lambda f, x: torch_checkpoint(f, x, use_reentrant=False)):
            events.clear()
            call(layer, *leaves((2, 3))).sum().backward()  # type: ignore[operator]
            seen.append([*events])
        assert seen[0] == seen[1]
        assert seen[0][:3] == ["pre", "post", "pre"]


def mode_dependent(x: Tensor) -> Tensor:
    if recomputing[0]:
        return x.sin() * torch.tensor([1.0, 2.0])
    return x.sin().exp()


recomputing = [False]


def error_of(keyword: bool, switch: bool | None) -> CheckpointError:
    (x,) = leaves((1,))
    recomputing[0] = False
    with set_checkpoint_debug_enabled(switch):
        out = checkpoint(mode_dependent, x, debug=keyword)
    recomputing[0] = True
    with pytest.raises(CheckpointError) as caught:
        out.sum().backward()
    recomputing[0] = False
    return caught.value


@pytest.mark.parametrize(
    ("keyword", "switch", "is_traced"),
    [
        (False, None, False),
        (True, None, True),
        (False, True, True),
        (True, False, False),
        (True, True, True),
        (False, False, False),
    ],
)
def test_debug_by_keyword_and_switch(keyword: bool, switch: bool | None, is_traced: bool) -> None:
    for _ in range(N_CALLS):
        error = error_of(keyword, switch)
        assert isinstance(error, ckptdeco.SavedTensorMismatch)
        assert bool(error.trace) is is_traced
        assert ("aten.exp.default" in str(error)) is is_traced
        assert ("You are seeing this error because you passed `debug=True` to checkpoint" in str(error)) is is_traced


def test_debug_with_a_context_fn_is_refused_as_torch_refuses_it() -> None:
    context_fn = lambda: (contextlib.nullcontext(), contextlib.nullcontext())  # noqa: E731
    with pytest.raises(ValueError, match="incompatible with non-default context_fn"):
        checkpoint(torch.sin, *leaves((3,)), debug=True, context_fn=context_fn)
    with set_checkpoint_debug_enabled(True), pytest.raises(ValueError, match="incompatible"):
        checkpoint(torch.sin, *leaves((3,)), context_fn=context_fn)
    with set_checkpoint_debug_enabled(False):
        checkpoint(torch.sin, *leaves((3,)), debug=True, context_fn=context_fn).sum().backward()
