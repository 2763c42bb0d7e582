"""Saved tensors that hold memory no kernel filled, or that are filled after they are saved: neither error nor noise.

Between forward and backward freed memory is filled with large numbers, so that what reads it cannot be right by luck.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from ckptdeco import is_recomputing
from tests.support.layers import DIM, Layer, Stack, Stem, batch
from tests.support.oracle import assert_same, total
from tests.support.subject import checkpointable, spec

ROWS = 16


def _spoil_freed_memory(sizes: tuple[int, ...] = (ROWS * DIM,)) -> None:
    held = [torch.full((size,), 1e30) for size in sizes for _ in range(64)]
    del held


def _spoiling_step(model: nn.Module, inputs: Any, context: Any) -> Any:
    with context():
        out = model(*inputs)
    _spoil_freed_memory()
    total(out).backward()
    return out


class Recurrent(Layer):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.cell = kind(DIM, DIM, batch_first=True)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.cell(x.view(2, -1, DIM))[0].reshape(-1, DIM)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_are_exact_and_raise_nothing(kind: Any, exact: Any) -> None:
    exact(lambda: Stem(Stack([Recurrent(kind) for _ in range(4)])), _spoiling_step, lambda: (batch(ROWS),))


class Leaky(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(DIM, DIM), nn.RReLU()

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x) * 1)


def test_rrelu_in_eval_is_exact_and_raises_nothing(exact: Any) -> None:
    """Its noise is made but not filled in eval."""
    exact(lambda: Stem(Stack([Leaky() for _ in range(4)])).eval(), _spoiling_step, lambda: (batch(ROWS),))


def test_rrelu_in_training_from_the_first_call_is_exact(exact: Any) -> None:
    """R20: the noise is saved first and filled then, so early stop is turned off."""
    exact(lambda: Stem(Stack([Leaky() for _ in range(4)])), _spoiling_step, lambda: (batch(ROWS),))


class LeakyLater(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = self.linear(x) * 1
        return functional.rrelu(h, training=True) if begun else functional.relu(h)


def _assert_exact_from(first: int, under: Any) -> None:
    calls = itertools.count(1)
    build = lambda: Stem(Stack([LeakyLater() for _ in range(4)]))  # noqa: E731
    assert_same(build, _spoiling_step, lambda: (batch(ROWS), next(calls) >= first), under, steps=7)


EARLY_STOP = [spec(segment=1), spec(levels="log")]


@pytest.mark.parametrize("first", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("made", [*EARLY_STOP, spec(segment=1, determinism_check="none")], ids=str)
def test_rrelu_begun_at_any_call_is_exact(made: Any, first: int) -> None:
    """R20: a call that saves other tensors than checked ones did is not stopped early."""
    one = made.make()
    _assert_exact_from(first, lambda: one)


class SavesThenFills(torch.autograd.Function):
    """What `F.rrelu` does, but one can tell that its two tensors have other types than those of a plain product."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        scale = torch.empty_like(x, dtype=torch.float64)
        ctx.save_for_backward(x, scale)
        scale.data.fill_(0.5)
        return x * 0.5

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _, scale = ctx.saved_tensors
        return grad * scale.to(grad.dtype)


class FillsLater(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = self.linear(x) * 1
        return SavesThenFills.apply(h) if begun else h * h.detach()


@pytest.mark.parametrize("made", EARLY_STOP, ids=str)
@pytest.mark.parametrize("first", [3, 5])
def test_function_of_the_users_that_fills_what_it_saved_is_exact_from_any_call(made: Any, first: int) -> None:
    one, calls = made.make(), itertools.count(1)
    build = lambda: Stem(Stack([FillsLater() for _ in range(4)]))  # noqa: E731
    assert_same(build, _spoiling_step, lambda: (batch(ROWS), next(calls) >= first), lambda: one, steps=6)


def test_call_that_saves_other_tensors_is_run_to_its_end_once_and_stopped_early_from_then_on() -> None:
    """What it took to find out that stopping is safe is not paid again."""
    ends: list[bool] = []

    class Grows(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        @checkpointable
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            h = self.linear(x)
            for _ in range(n):
                h = h.sin()
            ends.append(is_recomputing())
            return h

    layer, made = Grows(), spec(segment=1).make()
    stopped = []
    for n in (1, 1, 2, 1, 2, 2, 1):
        ends.clear()
        with made:
            layer(batch(), n).sum().backward()
        stopped.append(ends == [False])
    assert stopped == [True, True, False, True, True, True, True]


@pytest.mark.parametrize("first", [1, 3, 5, 6, 7])
def test_rrelu_is_exact_at_any_call_without_early_stop(first: int) -> None:
    one = spec(segment=2, early_stop=False).make()
    _assert_exact_from(first, lambda: one)


def test_rrelu_is_exact_without_any_check() -> None:
    one = spec(segment=1, determinism_check="none").make()
    _assert_exact_from(1, lambda: one)
