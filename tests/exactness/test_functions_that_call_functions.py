"""Layers reached through a function that calls another, the drop-in among decorated layers, what a layer may ask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ckptdeco
from tests.support.layers import DIM, Layer, Stack, Stem, batch
from tests.support.oracle import assert_same, total
from tests.support.subject import checkpointable, spec


def _dropped_in(function: Any, x: torch.Tensor, is_on: bool) -> torch.Tensor:
    return ckptdeco.checkpoint(function, x) if is_on else function(x)


class Draws(Layer):
    """Draws from a generator of its own, and reads an attribute that the loop changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(DIM, DIM), 1.0
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x) * torch.rand(DIM, generator=self.generator)) * self.scale


class Decorated(Draws):
    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x)


@pytest.mark.parametrize("kind", [Draws, Decorated])
@pytest.mark.parametrize("n_layers", [1, 5])
def test_layers_behind_two_functions_have_in_the_recompute_what_they_had_in_forward(
    kind: type[Draws], n_layers: int
) -> None:
    """One function for many layers: each has its own generator and its own attributes."""
    made = spec(segment=2).make()

    def step(model: Stack, inputs: Any, context: Any) -> Any:
        (x,) = inputs
        with context():
            for layer in model.layers:
                inner = lambda v: layer(v).sin()  # noqa: B023, E731 - bound late on purpose
                x = _dropped_in(lambda v: inner(v) + v, x, context is not plain)  # noqa: B023
        for layer in model.layers:
            layer.scale = 0.5
        total(x).backward()
        for layer in model.layers:
            layer.scale = 1.0
        return x, [layer.generator.get_state() for layer in model.layers]

    plain = None

    def step_of(model: Any, inputs: Any, context: Any) -> Any:
        nonlocal plain
        plain = context if context is not under else plain
        return step(model, inputs, context)

    under = lambda: made  # noqa: E731
    assert_same(lambda: Stack([kind() for _ in range(n_layers)]), step_of, lambda: (batch(),), under, steps=5)


class Cache:
    def __init__(self) -> None:
        self.n_seen = 0


class CountsInCache(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, *, cache: dict[str, Any]) -> torch.Tensor:
        cache["object"].n_seen += 1
        return torch.tanh(self.linear(x) / cache["object"].n_seen) * cache["scale"]


def test_cache_that_stands_beside_one_tensor_in_a_dict_is_seen_to_change(exact: Any) -> None:
    """As many tensors as arguments, yet not all arguments are tensors."""

    def step(model: Stack, inputs: Any, context: Any) -> Any:
        (x,) = inputs
        cache = {"object": Cache(), "scale": torch.full((1,), 0.5)}
        with context():
            for layer in model.layers:
                x = layer(x, cache=cache)
        total(x).backward()
        return x, cache["object"].n_seen

    exact(lambda: Stack([CountsInCache() for _ in range(4)]), step)


class AsksWhetherLeaf(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        return h.sin() if begun and x.is_leaf else h.exp()


def test_an_input_is_a_leaf_in_the_recompute_if_it_was_one(exact_from: Any) -> None:
    exact_from(lambda: Stem(Stack([AsksWhetherLeaf() for _ in range(4)])))
    exact_from(lambda: Stack([AsksWhetherLeaf() for _ in range(4)]))
