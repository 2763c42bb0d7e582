"""One layer called six times in a pass, and layers that share a parameter."""

from __future__ import annotations

from typing import Any

import torch

from tests.support.layers import BatchNormLayer, Block, Loop, Stack, TanhLayer, batch
from tests.support.oracle import assert_same, forward_backward


def six_times(m: Loop, x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = m.layers[0](x)
    return x


def test_one_layer_called_six_times(under: Any) -> None:
    assert_same(lambda: Loop([Block()], six_times), forward_backward, lambda: (batch(),), under)


def test_one_dropout_layer_called_six_times(under: Any) -> None:
    assert_same(lambda: Loop([Block(p=0.3)], six_times), forward_backward, lambda: (batch(),), under)


def test_one_batchnorm_layer_called_six_times(under: Any) -> None:
    assert_same(lambda: Loop([BatchNormLayer()], six_times), forward_backward, lambda: (batch(),), under)


def test_two_layers_in_turn_with_code_between(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for i in range(7):
            x = m.layers[i % 2](x) * 0.9 + 0.1
        return x

    assert_same(lambda: Loop([Block(), TanhLayer()], loop), forward_backward, lambda: (batch(),), under)


def test_layers_that_share_a_weight(under: Any) -> None:
    def build() -> Stack:
        layers = [TanhLayer() for _ in range(6)]
        for layer in layers[1:]:
            layer.linear.weight = layers[0].linear.weight
        return Stack(layers)

    assert_same(build, forward_backward, lambda: (batch(),), under)


def test_one_encoder_called_on_six_inputs(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([m.layers[1](m.layers[0](x * i)) for i in range(6)]).sum(0)

    assert_same(lambda: Loop([Block(p=0.2), TanhLayer()], loop), forward_backward, lambda: (batch(),), under)
