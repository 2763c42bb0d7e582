"""Statistics and other buffers are updated once a call, whenever a layer begins to update them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.layers import DIM, Layer, Stack
from tests.support.oracle import total
from tests.support.subject import checkpointable


class Normalises(Layer):
    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), norm

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.linear(x)))


def _untracked() -> nn.Module:
    norm = nn.BatchNorm1d(DIM)
    norm.num_batches_tracked = None  # as in models loaded from old checkpoints
    return norm


def _cumulative() -> nn.Module:
    return nn.BatchNorm1d(DIM, momentum=None)


def _unfrozen_late(model: Stack, inputs: Any, context: Any) -> Any:
    x, begun = inputs
    for layer in model.layers:
        layer.norm.train(begun)
    with context():
        out = model(x)
        total(out).backward()
    return out


@pytest.mark.parametrize("norm", [lambda: nn.BatchNorm1d(DIM), _untracked, _cumulative], ids=["usual", "old", "mean"])
def test_statistics_unfrozen_at_any_call_are_updated_once_a_call(norm: Any, exact_from: Any) -> None:
    exact_from(lambda: Stack([Normalises(norm()) for _ in range(4)]), _unfrozen_late)


class OwnStatistics(Layer):
    """functional.batch_norm over buffers, or over plain tensors that are no buffers."""

    def __init__(self, is_buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        if is_buffer:
            self.register_buffer("mean", torch.zeros(DIM))
            self.register_buffer("var", torch.ones(DIM))
        else:
            self.mean, self.var = torch.zeros(DIM), torch.ones(DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        return torch.relu(functional.batch_norm(self.linear(x), self.mean, self.var, training=begun))


@pytest.mark.parametrize("is_buffer", [True, False], ids=["buffers", "attributes"])
def test_functional_batch_norm_updates_its_statistics_once_a_call(is_buffer: bool, exact_from: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        total(out).backward()
        return out, [(layer.mean, layer.var) for layer in model.layers]

    exact_from(lambda: Stack([OwnStatistics(is_buffer) for _ in range(4)]), step)


class MovingAverage(Layer):
    """A buffer, written in place or replaced, that the layer reads and writes."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.linear, self.out, self.in_place = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), in_place
        self.register_buffer("average", torch.zeros(DIM))

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        if begun and self.in_place:
            self.average.lerp_(h.detach().mean(0), 0.1)
        elif begun:
            self.average = self.average.lerp(h.detach().mean(0), 0.1)
        return self.out(h - self.average)


@pytest.mark.parametrize("in_place", [True, False], ids=["in_place", "replaced"])
def test_moving_average_is_moved_once_a_call_and_read_as_in_forward(in_place: bool, exact_from: Any) -> None:
    exact_from(lambda: Stack([MovingAverage(in_place) for _ in range(4)]))


def test_moving_average_over_two_forwards_before_backward(exact_from: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        with context():
            one, two = model(*inputs), model(*inputs)
        (total(one) + total(two)).backward()
        return one, two

    exact_from(lambda: Stack([MovingAverage(in_place=False), AlwaysNormalises(), MovingAverage(in_place=False)]), step)


class AlwaysNormalises(Layer):
    """Takes the switch and normalises always."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(DIM, DIM), nn.BatchNorm1d(DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        return functional.silu(self.norm(self.linear(x)))
