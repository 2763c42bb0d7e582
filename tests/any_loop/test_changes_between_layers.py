"""Code between layers that changes a tensor in place, or looks at the same memory as something else."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

import ckptdeco
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


def _adds_in_place(m: Loop, x: torch.Tensor) -> torch.Tensor:
    for layer in m.layers:
        x += layer(x)
    return x


def test_add_in_place_of_the_layers_result(under: Any) -> None:
    """Legal in plain PyTorch, since the layer does not save its input (R33)."""
    build = lambda: Stem(Loop([Adds() for _ in range(4)], _adds_in_place))  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), under, steps=5)


def test_add_in_place_with_several_forwards_before_their_backwards(under: Any) -> None:
    def step(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            outputs = [model(x) for x in inputs]
        for out in outputs:
            out.square().sum().backward()
        return outputs

    build = lambda: Stem(Loop([Adds() for _ in range(4)], _adds_in_place))  # noqa: E731
    assert_same(build, step, lambda: tuple(batch() for _ in range(3)), under, steps=3)


def test_add_in_place_at_a_later_call_of_a_layer_that_is_shared(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        layer = m.layers[0]
        x = layer(layer(layer(x))) * 1.0
        x += layer(x)
        return layer(x)

    build = lambda: Stem(Loop([Adds()], loop))  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), under, steps=5)


class RemembersBias(Adds):
    """Its first call is stored, since it stores something on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table: torch.Tensor | None = None

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.arange(DIM) / DIM
        return torch.tanh(x + self.table + self.bias)


def test_add_in_place_of_a_layer_whose_first_call_is_stored(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        layer = m.layers[0]
        x += layer(x)
        return layer(x * 1.0)

    build = lambda: Stem(Loop([RemembersBias()], loop))  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), under, steps=5)


class Residual(Adds):
    """Nor does anything save its output."""

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x + self.bias)


@pytest.mark.parametrize("first", [{"segment": 3}, {"every": 2}, {"only": "*.layers.0", "keep_last": 1}], ids=str)
def test_add_in_place_is_learned_anew_where_another_policy_keeps_more(first: dict[str, Any]) -> None:
    """In the first step the input that is changed is not kept, in the next one it is (R33)."""
    policies = itertools.cycle([ckptdeco.policy(**first), ckptdeco.policy(segment=1)])

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        x = m.layers[0](m.layers[0](m.layers[0](x)))
        x += m.layers[0](x)
        return x

    build = lambda: Stem(Loop([Residual()], loop))  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), lambda: next(policies), steps=4)


def test_add_in_place_that_begins_late_is_exact_or_names_the_layer(under: Any) -> None:
    calls = itertools.count(1)

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        is_late = next(calls) % 8 in (3, 5, 6, 7)
        for layer in m.layers:
            if is_late:
                x += layer(x)
            else:
                x = x + layer(x)
        return x

    try:
        assert_same(
            lambda: Stem(Loop([Adds() for _ in range(4)], loop)), forward_backward, lambda: (batch(),), under, steps=8
        )
    except CheckpointError as error:
        assert "Adds" in str(error), str(error)  # noqa: PT017
        assert "x = x + layer(x)" in str(error), str(error)  # noqa: PT017


@pytest.mark.parametrize("step", [1, 2, 3])
def test_saved_input_changed_in_place_is_refused_as_plain_does(step: int, under: Any) -> None:
    stem, layers = nn.Linear(DIM, DIM), [Block() for _ in range(3)]
    for number in range(1, step + 1):
        h = stem(batch())
        x = h
        with under():
            for layer in layers:
                x = layer(x)
        if number == step:
            h.add_(1)
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                x.sum().backward()
        else:
            x.sum().backward()


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

    build = lambda: Stem(Loop([Adds() for _ in range(4)], loop))  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), under, steps=3)
