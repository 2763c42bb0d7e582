"""Keyword arguments, None and plain arguments reach every recompute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layers import DIM, Layer, Loop, MaskedLayer, batch, stack
from tests.support.oracle import assert_same, forward_backward, step_inside
from tests.support.subject import checkpointable


@pytest.mark.parametrize("program", [forward_backward, step_inside])
def test_chain_of_blocks(under: Any, program: Any) -> None:
    assert_same(stack, program, lambda: (batch(),), under, steps=4)


def test_tensor_keyword_gets_its_gradient(under: Any) -> None:
    model = lambda: Loop([MaskedLayer() for _ in range(6)], lambda m, x, mask: run(m, x, mask))  # noqa: E731

    def run(m: Loop, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x, mask=mask, scale=0.5)
        return x

    assert_same(model, forward_backward, lambda: (batch(), batch()), under)


def test_keyword_made_for_each_layer(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(m.layers):
            x = layer(x, mask=mask * (i + 1))
        return x

    assert_same(
        lambda: Loop([MaskedLayer() for _ in range(6)], loop), forward_backward, lambda: (batch(), batch()), under
    )


def test_plain_arguments_differ_from_call_to_call(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(m.layers):
            x = layer(x, None, scale=0.1 * i, mode=("tanh", "silu")[i % 2], flip=i % 3 == 0)
        return x

    assert_same(lambda: Loop([MaskedLayer() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


def test_whole_input_as_keyword(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(mask=None, x=x)
        return x

    assert_same(lambda: Loop([MaskedLayer() for _ in range(5)], loop), forward_backward, lambda: (batch(),), under)


class NamedLikeOptions(Layer):
    """Its arguments have the names of checkpointing options."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(
        self, x: torch.Tensor, *, early_stop: float, debug: torch.Tensor, name: str, function: Any
    ) -> torch.Tensor:
        assert name == "n"
        return function(self.linear(x)) * early_stop + debug * x


def test_arguments_named_like_options(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x, early_stop=0.5, debug=y, name="n", function=torch.tanh)
        return x

    assert_same(
        lambda: Loop([NamedLikeOptions() for _ in range(4)], loop), forward_backward, lambda: (batch(), batch()), under
    )


class Defaults(Layer):
    """Star arguments and defaults."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, *more: torch.Tensor | float, **named: torch.Tensor | None) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        for value in (*more, *named.values()):
            if value is not None:
                h = h * value
        return h


def test_star_arguments(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x, y, 2.0, a=y, b=None, c=y.detach())
        return x

    assert_same(lambda: Loop([Defaults() for _ in range(5)], loop), forward_backward, lambda: (batch(), batch()), under)


def test_same_tensor_given_twice(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x, x, twin=x)
        return x

    assert_same(lambda: Loop([Defaults() for _ in range(5)], loop), forward_backward, lambda: (batch(),), under)
