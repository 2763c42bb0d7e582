"""What a call refers to and what it keeps."""

from __future__ import annotations

import torch
from torch import nn

import ckptdeco


class FSDPModule:
    """Stands for the class that `fully_shard` gives a layer: recognised by its name, without importing it."""


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @ckptdeco.checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).tanh()


class GatheredLayer(FSDPModule, Layer):
    pass


def kept_inputs(layers: list[Layer]) -> list[bool]:
    x = torch.randn(2, 4, requires_grad=True)
    with ckptdeco.policy(segment=6):
        for layer in layers:
            x = layer(x)
        x.sum().backward()
    return [call.kept_bytes > 0 for call in ckptdeco.explain().calls]


def test_layers_of_one_segment_keep_one_input() -> None:
    assert kept_inputs([Layer() for _ in range(4)]) == [True, False, False, False]


def test_layer_whose_parameters_are_gathered_is_a_segment_of_its_own() -> None:
    """R13: it refers to no call, and the call after it does not refer to it."""
    assert kept_inputs([Layer(), Layer(), GatheredLayer(), Layer(), Layer()]) == [True, False, True, True, False]
