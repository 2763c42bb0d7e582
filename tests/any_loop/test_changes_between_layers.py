"""Code between layers that changes a tensor in place, or looks at the same memory as something else."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from tests.support.layers import DIM, Block, Layer, Loop, Stem, TanhLayer, batch
from tests.support.oracle import assert_same, forward_backward
from tests.support.subject import checkpointable

CheckpointError = torch.utils.checkpoint.CheckpointError


class Adds(Layer):
    """Its first operation does not save the input, so the caller may change that input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(DIM))

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.bias)


def exact_or_loud(build: Any, under: Any, fix: str) -> None:
    """Equal, or an error that names the layer and says the fix; never another number."""
    try:
        assert_same(build, forward_backward, lambda: (batch(),), under)
    except CheckpointError as error:
        assert fix in str(error), str(error)  # noqa: PT017
        assert "Adds" in str(error), str(error)  # noqa: PT017


@pytest.mark.filterwarnings("ignore")  # a warning in forward is welcome
def test_add_in_place_of_the_layers_result(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x += layer(x)
        return x

    exact_or_loud(lambda: Stem(Loop([Adds() for _ in range(4)], loop)), under, "x = x + layer(x)")


def test_data_changed_between_layers(under: Any) -> None:
    """x.data.mul_ bumps no version; the next layer must see the changed value in its recompute too."""

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x)
            x.data.mul_(1.5)
        return x

    assert_same(lambda: Loop([Block() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under, steps=4)


def test_numpy_alias_changed_between_layers(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x)
            x.detach().numpy()[0] *= 2
        return x

    assert_same(lambda: Loop([Block() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under, steps=4)


def test_in_place_between_layers_seen_by_autograd(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x)
            x.mul_(0.9)
        return x

    assert_same(lambda: Loop([Block() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


def test_data_attribute_between_layers(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(m.layers):
            x = layer(x)
            if i == 2:
                x = x + x.data
        return x

    assert_same(lambda: Loop([TanhLayer() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under)


class ComplexLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM, dtype=torch.complex64) / 3)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) + x


def test_conjugate_between_layers(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        x = torch.complex(x, x.flip(0))
        for layer in m.layers:
            x = layer(x).conj()
        return x

    assert_same(lambda: Loop([ComplexLayer() for _ in range(5)], loop), forward_backward, lambda: (batch(),), under)


def test_negative_view_between_layers(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        x = torch.complex(x, x.flip(0))
        for layer in m.layers:
            x = layer(x)
            x = torch.complex(x.real, x.conj().imag)
        return x

    assert_same(lambda: Loop([ComplexLayer() for _ in range(5)], loop), forward_backward, lambda: (batch(),), under)


@pytest.mark.filterwarnings("ignore")  # a warning in forward is welcome
def test_input_changed_after_its_layer_ran(under: Any) -> None:
    """Legal in plain torch, since `x + bias` does not save x."""

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            y = layer(x)
            x.zero_()
            x = y * 1.0
        return x

    exact_or_loud(lambda: Stem(Loop([Adds() for _ in range(4)], loop)), under, "Fix:")
