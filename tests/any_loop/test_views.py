"""Layers fed by views of what the layer before returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layers import DIM, Layer, Loop, TanhLayer, batch
from tests.support.oracle import assert_same, forward_backward
from tests.support.subject import checkpointable

VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "view_as": lambda x: x.view_as(x),
    "view": lambda x: x.view(2, -1, DIM).view(-1, DIM),
    "slice_all": lambda x: x[:],
    "slice_rows": lambda x: x[1:],
    "transpose_twice": lambda x: x.t().t(),
    "unsqueeze": lambda x: x.unsqueeze(0).squeeze(0),
    "flip_halves": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "alias_of_part": lambda x: x.unfold(0, 2, 1).select(2, 0),
    "expand": lambda x: x[:1].expand(3, DIM),
    "real": lambda x: x.real,
}


@pytest.mark.parametrize("view", VIEWS)
def test_view_between_layers(under: Any, view: str) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = VIEWS[view](layer(x))
        return x

    assert_same(lambda: Loop([TanhLayer() for _ in range(5)], loop), forward_backward, lambda: (batch(10),), under)


class Splits(Layer):
    """Returns views of one storage."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 2 * DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.linear(x).tanh().chunk(2, -1)


def test_views_of_one_storage_are_not_confused(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            a, b = layer(x)
            x = b if layer is m.layers[2] else a
        return x

    assert_same(lambda: Loop([Splits() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


class ReturnsInputView(Layer):
    """Passes a view of its input on beside its own result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.view(-1, DIM), torch.tanh(self.linear(x))


def test_view_of_the_input_passed_on(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            same, new = layer(x)
            x = same if layer is m.layers[3] else new + same
        return x

    assert_same(lambda: Loop([ReturnsInputView() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)
