"""A layer that writes its own weights in forward is exact, whenever it begins, and writes them once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layers import DIM, Layer, Stack, Stem
from tests.support.oracle import total
from tests.support.subject import checkpointable

ROWS = 4


class WritesWeights(Layer):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(DIM, DIM), how
        self.rows = nn.Embedding(ROWS, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        weight = self.linear.weight
        if begun:
            self.rows.max_norm = 1.0 if self.how == "max_norm" else None
            with torch.no_grad():
                if self.how == "clamp":
                    weight.clamp_(-0.2, 0.2)
                elif self.how == "decay":
                    weight.mul_(0.9)
                elif self.how == "normalise":
                    weight.copy_(weight / weight.norm(dim=1, keepdim=True))
        return torch.tanh(self.linear(x)) * self.rows(torch.arange(ROWS))


@pytest.mark.parametrize("how", ["clamp", "decay", "normalise", "max_norm"])
def test_weights_written_in_forward_are_written_once_a_call(how: str, exact_from: Any) -> None:
    exact_from(lambda: Stem(Stack([WritesWeights(how) for _ in range(4)])))


def test_weights_written_in_forward_with_backward_inside_the_policy(exact_from: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
            total(out).backward()
        return out

    exact_from(lambda: Stem(Stack([WritesWeights("clamp") for _ in range(4)])), step)
