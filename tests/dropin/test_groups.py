"""Contract 14: `torch.utils.checkpoint.GraphExecGroup`."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.utils.checkpoint import GraphExecGroup

import ckptdeco
from ckptdeco import GroupOverlapError, checkpoint
from tests.dropin.comparing import N_CALLS, leaves, of_torch
from tests.support.oracle import assert_equal

n_runs = {"outer": 0, "inner": 0}


def inner(y: Tensor) -> Tensor:
    n_runs["inner"] += 1
    return y.sin().cos().exp()


def two_parts(x: Tensor) -> tuple[Tensor, Tensor]:
    n_runs["outer"] += 1
    y = x.sin().cos()
    return y, y.sin().cos().exp()


def gradient_in_parts(y: Tensor, z: Tensor, x: Tensor) -> Tensor:
    (grad_y,) = torch.autograd.grad(z, y, torch.ones_like(z))
    (grad_x,) = torch.autograd.grad(y, x, grad_y)
    return grad_x


def plain_gradient() -> Tensor:
    (x,) = leaves((3, 3))
    (grad,) = torch.autograd.grad(two_parts(x)[1].sum(), x)
    return grad


@pytest.fixture(autouse=True)
def _counters() -> None:
    n_runs.update(outer=0, inner=0)


def test_backward_calls_of_a_group_share_one_recompute(early_stop: bool) -> None:
    expected = plain_gradient()
    for _ in range(N_CALLS):
        (x,) = leaves((3, 3))
        n_runs["outer"] = 0
        y, z = checkpoint(two_parts, x, early_stop=early_stop)
        with GraphExecGroup():
            grad = gradient_in_parts(y, z, x)
        assert n_runs["outer"] == 2
        assert_equal(expected, grad, "grad")
        y, z = checkpoint(two_parts, x, early_stop=early_stop)
        assert_equal(expected, gradient_in_parts(y, z, x), "grad")
        assert n_runs["outer"] == 5


def test_one_group_entered_twice_shares_one_recompute() -> None:
    (x,) = leaves((3, 3))
    y, z = checkpoint(two_parts, x)
    group = GraphExecGroup()
    with group:
        (grad_y,) = torch.autograd.grad(z.sum(), y)
    with group:
        (grad_x,) = torch.autograd.grad(y, x, grad_y)
    assert n_runs["outer"] == 2
    assert_equal(plain_gradient(), grad_x, "grad")


@pytest.mark.parametrize("call", [checkpoint, of_torch])
def test_nested_calls_of_a_group(call: Any) -> None:
    """ckptdeco's own call inside torch's, or the other way round, share it as well."""

    def outer(x: Tensor) -> tuple[Tensor, Tensor]:
        n_runs["outer"] += 1
        y = x.sin().cos()
        return y, call(inner, y)

    for other in (checkpoint, of_torch):
        for _ in range(N_CALLS):
            n_runs.update(outer=0, inner=0)
            (x,) = leaves((3, 3))
            y, z = other(outer, x)
            with GraphExecGroup():
                grad = gradient_in_parts(y, z, x)
            assert n_runs["outer"] == 2
            assert n_runs["inner"] == 2  # the outer recompute ends where it begins
            assert_equal(plain_gradient(), grad, "grad")


def test_overlapping_backward_calls_raise() -> None:
    for _ in range(N_CALLS):
        (x,) = leaves((3, 3))
        out = checkpoint(lambda x: x.sin().cos(), x).sum()
        with GraphExecGroup():
            out.backward(retain_graph=True)
            with pytest.raises(GroupOverlapError, match="Performing two backward calls that overlap") as caught:
                out.backward(retain_graph=True)
        assert isinstance(caught.value, torch.utils.checkpoint.CheckpointError)
        x.grad = None
        out.backward()  # outside of the group there is no such rule
        assert_equal((-x.detach().sin().sin() * x.detach().cos()), x.grad, "grad")


class ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] + grad * ctx.saved_tensors[0]


def test_reading_twice_in_one_backward_is_no_overlap() -> None:
    for _ in range(N_CALLS):
        (x,) = leaves((3,))
        out = checkpoint(lambda x: ReadsTwice.apply(x.sin()), x).sum()
        (reference,) = leaves((3,))
        ReadsTwice.apply(reference.sin()).sum().backward()
        with GraphExecGroup():
            out.backward()
        assert_equal(reference.grad, x.grad, "grad")


def test_decorated_layers_share_a_segment_of_a_group() -> None:
    layers = [ckptdeco.checkpointable(lambda x, k=k: inner(x) * k) for k in range(1, 5)]

    def forward(x: Tensor) -> list[Tensor]:
        outs = [x]
        for layer in layers:
            outs.append(layer(outs[-1]))
        return outs

    def run(is_grouped: bool) -> tuple[Tensor, int]:
        (x,) = leaves((3,))
        n_runs["inner"] = 0
        with ckptdeco.policy(segment=4):
            outs = forward(x)
        group: Any = GraphExecGroup() if is_grouped else torch.enable_grad()
        with group:
            (grad,) = torch.autograd.grad(outs[4].sum(), outs[2], retain_graph=True)
            (grad,) = torch.autograd.grad(outs[2], x, grad)
        return grad, n_runs["inner"]

    (x,) = leaves((3,))
    (expected,) = torch.autograd.grad(forward(x)[-1].sum(), x)
    for _ in range(N_CALLS):
        grad, n = run(is_grouped=True)
        assert_equal(expected, grad, "grad")
        assert n == 8  # each of the four once in forward and once in the shared recompute


def test_values_go_with_the_group() -> None:
    storages: list[weakref.ref[Any]] = []

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        z = y.exp()
        storages.append(weakref.ref(z.untyped_storage()))
        return z.tanh(), y.cos()

    (x,) = leaves((64,))
    a, b = checkpoint(function, x, early_stop=False)
    gc.disable()
    with GraphExecGroup():
        torch.autograd.grad(b.sum(), x, retain_graph=True)
        assert storages[-1]() is not None  # waits for another pass of the group
    assert storages[-1]() is None
    gc.enable()
    del a


def test_reading_a_saved_tensor_outside_of_backward_is_not_part_of_the_group() -> None:
    (x,) = leaves((3,))
    out = checkpoint(lambda x: x.sin().exp(), x)
    with GraphExecGroup():
        assert_equal(out.detach(), out.grad_fn._saved_result.detach(), "saved result")
        out.sum().backward()
    assert x.grad is not None
