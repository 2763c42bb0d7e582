"""The oracle notices each kind of difference: a guard that cannot fail proves nothing."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from torch import nn

from tests.support.layers import BatchNormLayer, Block, Stack, batch, stack
from tests.support.oracle import assert_equal, assert_same, forward_backward


@contextlib.contextmanager
def marker() -> Iterator[None]:
    yield


def spoiled(spoil: Callable[[nn.Module, Any], None]) -> Callable[..., Any]:
    """The usual program, spoilt at its end when it runs under the policy."""

    def program(model: nn.Module, inputs: Any, under: Any) -> Any:
        outputs = forward_backward(model, inputs, under)
        if under is marker:
            with torch.no_grad():
                spoil(model, inputs)
        return outputs

    return program


def build() -> Stack:
    return Stack([Block(), BatchNormLayer()])


SPOILERS: dict[str, tuple[Callable[[nn.Module, Any], object], str]] = {
    "a gradient off by one bit": (
        lambda m, i: m.layers[0].up.weight.grad.view(torch.int32)[0, 0].bitwise_xor_(1),
        r"parameter_grads layers.0.up.weight differs",
    ),
    "a gradient lost": (lambda m, i: setattr(m.layers[0].up.bias, "grad", None), "parameter_grads layers.0.up.bias"),
    "a buffer updated twice": (
        lambda m, i: m.layers[1].norm.num_batches_tracked.add_(1),
        "buffers .*num_batches_tracked",
    ),
    "an input gradient": (lambda m, i: i[0].grad.add_(1), "input_grads"),
    "an input gradient lost": (lambda m, i: setattr(i[0], "grad", None), "input_grads"),
    "a parameter": (lambda m, i: m.layers[1].linear.weight.add_(1), "parameters layers.1.linear.weight differs"),
    "torch's generator": (lambda m, i: torch.rand(1), "torch_rng"),
    "Python's generator": (lambda m, i: random.random(), "python_rng"),
    "NumPy's generator": (lambda m, i: numpy.random.rand(), "numpy_rng"),
}


@pytest.mark.parametrize("kind", SPOILERS)
def test_oracle_notices(kind: str) -> None:
    spoil, message = SPOILERS[kind]
    with pytest.raises(AssertionError, match=message):
        assert_same(build, spoiled(spoil), lambda: (batch(),), marker)


def test_oracle_notices_another_output() -> None:
    def program(model: nn.Module, inputs: Any, under: Any) -> Any:
        return forward_backward(model, inputs, under) + (under is marker)

    with pytest.raises(AssertionError, match="outputs"):
        assert_same(build, program, lambda: (batch(),), marker)


def test_oracle_notices_a_difference_in_a_later_step_only() -> None:
    n_runs = []

    def program(model: nn.Module, inputs: Any, under: Any) -> Any:
        n_runs.append(under is marker)
        out = forward_backward(model, inputs, under)
        return out * 2 if n_runs.count(True) == 3 and under is marker else out

    with pytest.raises(AssertionError, match="step 2"):
        assert_same(build, program, lambda: (batch(),), marker, steps=3)


def test_oracle_passes_the_plain_run() -> None:
    plain, other = assert_same(build, forward_backward, lambda: (batch(),), marker)
    assert plain is not other


def test_nan_equals_nan_only() -> None:
    nan = torch.tensor([float("nan"), 1.0])
    assert_equal(nan, nan.clone(), "x")
    with pytest.raises(AssertionError):
        assert_equal(nan, torch.tensor([0.0, 1.0]), "x")


@pytest.mark.parametrize("other", [torch.ones(3, 1), torch.ones(3).double(), None, 1.0])
def test_shape_dtype_and_kind_count(other: object) -> None:
    with pytest.raises(AssertionError):
        assert_equal(torch.ones(3), other, "x")


def test_stack_of_the_tests_has_labels() -> None:
    assert [layer.label for layer in stack(3).layers] == ["0", "1", "2"]
