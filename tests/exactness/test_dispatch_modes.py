"""Dispatch modes around forward only: one that changes values does so again, one that watches sees no recompute."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.support.layers import Block, Stack, batch
from tests.support.oracle import assert_same, total


class Counts(TorchDispatchMode):
    """Watches."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Softens(TorchDispatchMode):
    """Changes the values of one operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 0.5 if func is torch.ops.aten.gelu.default else out


class Widens(TorchDispatchMode):
    """Changes the type of what is saved."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.gelu.default:
            return func(args[0].double()).float()
        return func(*args, **(kwargs or {}))


def _build() -> Stack:
    return Stack([Block(p=0.2) for _ in range(4)])


@pytest.mark.parametrize("make", [Softens, Widens])
@pytest.mark.parametrize("begins", [1, 3, 6])
def test_mode_that_changes_values_does_so_in_the_recompute(make: Any, begins: int, under: Any) -> None:
    steps = iter(range(2, 100))

    def step(model: Any, inputs: Any, context: Any) -> Any:
        if next(steps) // 2 < begins:
            with context():
                out = model(*inputs)
        else:
            with make(), context():
                out = model(*inputs)
        total(out).backward()
        return out

    assert_same(_build, step, lambda: (batch(),), under, steps=7)


class WarmsUp(TorchDispatchMode):
    """Only watches for a while, as a quantiser does that has a warm-up."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * self.factor if func is torch.ops.aten.gelu.default else out


@pytest.mark.parametrize("begins", [2, 3, 5])
def test_mode_that_begins_to_change_values(begins: int, under: Any) -> None:
    steps = iter(range(2, 100))

    def step(model: Any, inputs: Any, context: Any) -> Any:
        with WarmsUp(1.0 if next(steps) // 2 < begins else 0.5), context():
            out = model(*inputs)
        total(out).backward()
        return out

    assert_same(_build, step, lambda: (batch(),), under, steps=7)


def _operators(counts: Counter[str]) -> dict[str, int]:
    """Those that compute; the hooks take aliases of what they hold."""
    return {name: n for name, n in counts.items() if "detach" not in name}


def test_mode_that_watches_sees_what_it_sees_in_the_plain_run(under: Any) -> None:
    def step(model: Any, inputs: Any, context: Any) -> Any:
        with Counts() as counts, context():
            out = model(*inputs)
        total(out).backward()
        return out, _operators(counts.seen)

    assert_same(_build, step, lambda: (batch(),), under, steps=7)


def test_flops_of_forward_are_those_of_the_plain_run(under: Any) -> None:
    def step(model: Any, inputs: Any, context: Any) -> Any:
        counter = FlopCounterMode(display=False)
        with counter, context():
            out = model(*inputs)
        total(out).backward()
        return out, counter.get_total_flops()

    assert_same(_build, step, lambda: (batch(),), under, steps=7)


def test_modes_of_each_step_leave_nothing_behind(under: Any) -> None:
    from ckptdeco.engine.layer import layer_info

    model = _build()
    for _ in range(6):
        with Counts(), under():
            out = model(batch())
        total(out).backward()
    layer = model.layers[0]
    assert len(layer_info(layer, type(layer).forward).protections) == 1
