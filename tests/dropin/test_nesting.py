"""Contract 4: ours in torch's, torch's in ours, to any depth, with randomness and grad inside."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import ckptdeco
from ckptdeco import checkpoint
from tests.dropin.comparing import assert_same_as_plain, leaves, of_torch


def directly(function: Any, *args: Any) -> Any:
    return function(*args)


CALLS = {"ours": checkpoint, "torchs": of_torch}
PAIRS = [*itertools.product(CALLS, CALLS)]


def leaf(x: Tensor) -> Tensor:
    return nn.functional.dropout(x.sin().exp(), 0.3).tanh()


n_runs = [0]


def counted(x: Tensor) -> Tensor:
    n_runs[0] += 1
    return x.sin().exp()


def tree(calls: tuple[Any, ...], x: Tensor) -> Any:
    """Two calls on each level, each with a level below."""
    if not calls:
        return leaf(x)
    below = functools.partial(tree, calls[1:])
    return (calls[0](below, x * 1.5) + calls[0](below, x.cos())).sin()


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_any_mixture_to_any_depth(depth: int) -> None:
    for calls in itertools.product(CALLS.values(), repeat=depth):
        plain = functools.partial(tree, (directly,) * depth)
        assert_same_as_plain(plain, functools.partial(tree, calls), (3, 3))


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_second_derivative_through_both(outer: str, inner: str) -> None:
    def twice(first: Any, second: Any, x: Tensor) -> Tensor:
        out = first(lambda y: second(leaf, y * 2).cos(), x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return grad

    assert_same_as_plain(
        functools.partial(twice, directly, directly), functools.partial(twice, CALLS[outer], CALLS[inner]), (3,)
    )


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_grad_inside_both(outer: str, inner: str) -> None:
    def penalty(second: Any, x: Tensor) -> Tensor:
        out = second(torch.tanh, x * 3)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out * grad

    def run(first: Any, second: Any, x: Tensor) -> Any:
        return first(functools.partial(penalty, second), x.sin())

    assert_same_as_plain(
        functools.partial(run, directly, directly), functools.partial(run, CALLS[outer], CALLS[inner]), (3,)
    )


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_selective_inside_both(outer: str, inner: str) -> None:
    context_fn = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])

    def inside(x: Tensor, w: Tensor) -> Tensor:
        return leaf(torch.mm(x, w))

    def run(first: Any, second: Any, x: Tensor, w: Tensor) -> Any:
        return first(lambda x, w: second(inside, x.cos(), w).sin(), x, w)

    assert_same_as_plain(
        functools.partial(run, directly, directly),
        functools.partial(run, CALLS[outer], functools.partial(CALLS[inner], context_fn=context_fn)),
        (3, 3),
        (3, 3),
    )


@pytest.mark.parametrize("is_nested", [False, True])
@pytest.mark.parametrize("segment", [1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_decorated_layers_inside(name: str, segment: int, is_nested: bool) -> None:
    """R6: they are plain there, or with nested=True recomputed inside the recompute."""
    layer = ckptdeco.checkpointable(leaf)

    def run(call: Any, x: Tensor) -> Any:
        with ckptdeco.policy(segment=segment, nested=is_nested):
            return call(lambda x: layer(layer(layer(x))), x)

    assert_same_as_plain(lambda x: leaf(leaf(leaf(x))), functools.partial(run, CALLS[name]), (3,))


def test_decorated_layers_inside_are_plain_unless_nested() -> None:
    for is_nested, runs in ((False, 2), (True, 3)):
        layers = [ckptdeco.checkpointable(counted), ckptdeco.checkpointable(counted)]
        (x,) = leaves((3,))
        n_runs[0] = 0
        with ckptdeco.policy(segment=1, nested=is_nested):
            out = checkpoint(lambda x, layers=layers: layers[1](layers[0](x)).sin(), x)
        out.sum().backward()
        assert n_runs[0] == 2 * runs  # two layers: forward, recompute, and each alone


@pytest.mark.parametrize("name", CALLS)
def test_inside_decorated_layers(name: str) -> None:
    layer = ckptdeco.checkpointable(lambda x: CALLS[name](leaf, x).sin())  # type: ignore[operator]

    def run(x: Tensor) -> Any:
        with ckptdeco.policy(segment=3):
            return layer(layer(layer(layer(x))))

    def plain(x: Tensor) -> Tensor:
        for _ in range(4):
            x = leaf(x).sin()
        return x

    assert_same_as_plain(plain, run, (3,))
