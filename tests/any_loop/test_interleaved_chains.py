"""Two chains whose calls take turns."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.layers import Block, CrossLayer, Loop, TanhLayer, batch
from tests.support.oracle import assert_same, forward_backward


def test_two_chains_take_turns(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> Any:
        for a, b in zip(m.layers[:6], m.layers[6:], strict=True):
            x, y = a(x), b(y)
        return x, y

    build = lambda: Loop([Block(p=0.2) for _ in range(6)] + [TanhLayer() for _ in range(6)], loop)  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(), batch(3)), under)


def test_two_chains_of_unequal_pace(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> Any:
        for i, layer in enumerate(m.layers):
            if i % 3:
                x = layer(x)
            else:
                y = layer(y)
        return x + y

    assert_same(lambda: Loop([Block() for _ in range(9)], loop), forward_backward, lambda: (batch(), batch()), under)


def test_two_chains_of_the_same_layers(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> Any:
        for layer in m.layers:
            x, y = layer(x), layer(y)
        return x, y

    assert_same(
        lambda: Loop([Block(p=0.1) for _ in range(6)], loop), forward_backward, lambda: (batch(), batch()), under
    )


def test_chains_that_swap_at_every_layer(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> Any:
        for layer in m.layers:
            x, y = y, layer(x)
        return x, y

    assert_same(
        lambda: Loop([TanhLayer() for _ in range(7)], loop), forward_backward, lambda: (batch(), batch()), under
    )


def test_chains_that_look_at_each_other(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> Any:
        for i in range(0, 6, 2):
            x = m.layers[i](x, y)
            y = m.layers[i + 1](y, x)
        return x, y

    assert_same(
        lambda: Loop([CrossLayer() for _ in range(6)], loop), forward_backward, lambda: (batch(), batch()), under
    )
