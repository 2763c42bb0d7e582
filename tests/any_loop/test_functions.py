"""Plain functions decorated, with weights as arguments, in closures and in a module."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support.layers import DIM, Loop, batch
from tests.support.oracle import assert_same, forward_backward
from tests.support.subject import checkpointable


@checkpointable
def layer(x: torch.Tensor, weight: torch.Tensor, *, bias: torch.Tensor | None = None) -> torch.Tensor:
    h = torch.tanh(x @ weight)
    return h if bias is None else h + bias


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.randn(DIM, DIM) for _ in range(6))
        self.bias = nn.Parameter(torch.randn(DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = layer(x, weight, bias=self.bias)
        return x


def test_plain_function_with_weights_as_arguments(under: Any) -> None:
    assert_same(Weights, forward_backward, lambda: (batch(),), under)


def test_closures_over_weights(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for part in m.layers:

            @checkpointable
            def inner(h: torch.Tensor, part: nn.Module = part) -> torch.Tensor:
                return torch.tanh(part(h)) * h

            x = inner(x)
        return x

    assert_same(
        lambda: Loop([nn.Linear(DIM, DIM) for _ in range(6)], loop), forward_backward, lambda: (batch(),), under
    )


def test_functions_and_weights_computed_in_the_loop(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for part in m.layers:
            x = layer(x, part.weight.t().softmax(0), bias=part.bias * 2)
        return x

    assert_same(
        lambda: Loop([nn.Linear(DIM, DIM) for _ in range(6)], loop), forward_backward, lambda: (batch(),), under
    )


def test_lambda_and_partial(under: Any) -> None:
    import functools

    double = checkpointable(lambda h, w: torch.tanh(h @ w) * h)

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for part in m.layers:
            x = functools.partial(double, w=part.weight)(x)
        return x

    assert_same(
        lambda: Loop([nn.Linear(DIM, DIM) for _ in range(6)], loop), forward_backward, lambda: (batch(),), under
    )
