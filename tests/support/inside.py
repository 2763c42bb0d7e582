"""Layers whose forward is a function that a test gives: `Runs`, and `Around` with a decorated layer inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.support.layers import DIM, Layer, Stack, Stem
from tests.support.subject import checkpointable

Function = Callable[..., Any]


class Runs(Layer):
    """Calls `function(layer, x)`, which finds some weights on the layer."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.one, self.two, self.wide = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, 3 * DIM)
        self.conv = nn.Conv1d(DIM, DIM, 3, padding=1)
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 3)
        self.register_buffer("constant", torch.randn(DIM, DIM) / 3)

    @checkpointable
    def forward(self, x: torch.Tensor, *args: Any) -> Any:
        return self.function(self, x, *args)


class Inner(Layer):
    """The same inside another, with state that the function may change."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        self.linear = nn.Linear(DIM, DIM)
        self.seen: Any = None
        self.n_calls = 0
        self.generator = torch.Generator().manual_seed(3)
        self.register_buffer("memory", torch.zeros(DIM))

    @checkpointable
    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, x, *args, **kwargs)


class Around(Layer):
    """Calls `function(layer, x)`; `inner` is what its decorated layer inside does."""

    def __init__(self, function: Function, inner: Function) -> None:
        super().__init__()
        self.function = function
        self.inner = Inner(inner)
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def stack_of(function: Function, inner: Function | None = None, n_layers: int = 3) -> Stem:
    """A model of such layers."""
    return Stem(Stack([Runs(function) if inner is None else Around(function, inner) for _ in range(n_layers)]))


def attention(layer: Runs, x: torch.Tensor, dropout_p: float = 0.0) -> torch.Tensor:
    """What `scaled_dot_product_attention` gives for two heads, at the width of `x`."""
    n_rows = x.shape[0]
    heads = layer.wide(x).view(1, n_rows, 3, 2, DIM // 2).permute(2, 0, 3, 1, 4)
    mixed = nn.functional.scaled_dot_product_attention(*heads.unbind(0), dropout_p=dropout_p)
    return mixed.transpose(1, 2).reshape(n_rows, DIM)
