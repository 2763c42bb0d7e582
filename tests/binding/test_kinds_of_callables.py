"""Functions, methods, class and static methods, inherited and nested ones: each is bound as before, and recomputed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

import pytest
import torch

from tests.support import meters
from tests.support.bound import Bare, CallsSuper, Chain, DecoratesAgain, Inherits, Kinds, function
from tests.support.layers import DIM, batch
from tests.support.subject import ENGINE, checkpointable, policy

RUNS = {"none": 1}.get(ENGINE, 2)


def runs(call: Callable[[torch.Tensor], torch.Tensor], label: str, parameters: list[torch.Tensor]) -> int:
    """How often `label` ran in a forward and backward under a policy; asserts that the gradients are the plain ones."""
    x = batch()
    expected = torch.autograd.grad(call(x).square().sum(), [x, *parameters])
    with meters.count_forwards() as counter:
        with policy(segment=1):
            y = call(x)
        got = torch.autograd.grad(y.square().sum(), [x, *parameters])
    assert all(map(torch.equal, expected, got))
    return counter[label]


def test_function() -> None:
    weight = torch.randn(DIM, DIM, requires_grad=True)
    assert runs(lambda x: function(x, weight, scale=3.0), "function", [weight]) == RUNS


def test_method_called_through_the_module() -> None:
    layer = Kinds()
    assert runs(layer, "Kinds", [layer.weight]) == RUNS


def test_method_called_directly_and_from_the_class() -> None:
    layer = Kinds()
    assert runs(layer.forward, "Kinds", [layer.weight]) == RUNS
    assert runs(lambda x: Kinds.forward(layer, x), "Kinds", [layer.weight]) == RUNS


def test_method_that_is_not_forward() -> None:
    layer = Kinds()
    assert runs(layer.other, "other", [layer.weight]) == RUNS


@pytest.mark.parametrize("name", ["of_class", "of_class_inside"])
@pytest.mark.parametrize("cls", [Kinds, Inherits])
def test_class_method_gets_the_class(name: str, cls: type[Kinds]) -> None:
    weight = torch.randn(DIM, DIM, requires_grad=True)
    for owner in (cls, cls()):
        assert runs(lambda x, o=owner: getattr(o, name)(x, weight), f"{name} {cls.__name__}", [weight]) == RUNS


@pytest.mark.parametrize("name", ["static", "static_inside"])
def test_static_method(name: str) -> None:
    weight = torch.randn(DIM, DIM, requires_grad=True)
    for owner in (Kinds, Inherits, Kinds()):
        assert runs(lambda x, o=owner: getattr(o, name)(x, weight), name, [weight]) == RUNS


def test_inherited_forward() -> None:
    layer = Inherits()
    assert runs(layer, "Inherits", [layer.weight]) == RUNS


def test_undecorated_forward_that_calls_the_decorated_one() -> None:
    layer = CallsSuper()
    assert runs(layer, "CallsSuper", [layer.weight]) == RUNS


def test_decorated_forward_that_calls_the_decorated_one() -> None:
    """The outermost owns what is inside (R6): the inner one is not recomputed twice."""
    layer = DecoratesAgain()
    assert runs(layer, "DecoratesAgain", [layer.weight]) == RUNS


def test_decorated_twice() -> None:
    weight = torch.randn(DIM, DIM, requires_grad=True)
    twice = checkpointable(function)
    assert runs(lambda x: twice(x, weight), "function", [weight]) == RUNS


def test_function_made_in_a_function() -> None:
    weight = torch.randn(DIM, DIM, requires_grad=True)

    def outer() -> Callable[[torch.Tensor], torch.Tensor]:
        @checkpointable
        def inner(x: torch.Tensor) -> torch.Tensor:
            meters.tick("inner")
            return torch.tanh(x @ weight)

        return inner

    assert runs(outer(), "inner", [weight]) == RUNS


def test_partial_of_a_decorated_and_decorated_partial() -> None:
    weight = torch.randn(DIM, DIM, requires_grad=True)

    def plain(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        meters.tick("plain")
        return torch.tanh(x @ weight)

    assert runs(functools.partial(checkpointable(plain), weight), "plain", [weight]) == RUNS
    assert runs(checkpointable(functools.partial(plain, weight)), "plain", [weight]) == RUNS


def test_bound_method_decorated_on_the_instance() -> None:
    layer = Bare()
    layer.forward = checkpointable(layer.forward)
    assert runs(layer, "Bare", [layer.weight]) == RUNS


def test_callable_object() -> None:
    class Callable_:
        def __init__(self) -> None:
            self.weight = torch.randn(DIM, DIM, requires_grad=True)

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            meters.tick("object")
            return torch.tanh(x @ self.weight)

    made = Callable_()
    assert runs(checkpointable(made), "object", [made.weight]) == RUNS


def test_module_instance_decorated() -> None:
    layer = Bare()
    decorated = checkpointable(layer)
    assert runs(decorated, "Bare", [layer.weight]) == RUNS


def test_chain_of_all_kinds_in_one_segment() -> None:
    model = Chain(Kinds(), Inherits(), CallsSuper(), DecoratesAgain())
    x = batch()
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    with policy(segment=4):
        y = model(x)
    assert all(map(torch.equal, expected, torch.autograd.grad(y.sum(), [x, *model.parameters()])))


@pytest.mark.skipif(ENGINE != "ckptdeco", reason="the stand-ins check nothing")
@pytest.mark.parametrize("value", [3, "forward", None, object()])
def test_what_cannot_be_called_cannot_be_decorated(value: object) -> None:
    from ckptdeco.errors import PolicyError

    with pytest.raises(PolicyError) as caught:
        checkpointable(value)
    assert caught.value.value is value
    assert caught.value.argument
    text = str(caught.value)
    assert "Fix:" in text
    assert repr(value) in text


@pytest.mark.skipif(ENGINE != "ckptdeco", reason="the stand-ins check nothing")
def test_a_class_cannot_be_decorated_by_mistake() -> None:
    """`@checkpointable class Block` would turn the class into something that is no class."""
    with pytest.raises(Exception, match="Fix:"):
        checkpointable(Bare)


def test_name_given_to_the_decorator() -> None:
    weight = torch.randn(DIM, DIM, requires_grad=True)

    @checkpointable(name="projection")
    def named(x: torch.Tensor) -> torch.Tensor:
        """Its doc."""
        meters.tick("named")
        return torch.tanh(x @ weight)

    assert named.__name__ == "named"
    assert named.__doc__ == "Its doc."
    assert runs(named, "named", [weight]) == RUNS


@pytest.mark.skipif(ENGINE != "ckptdeco", reason="the stand-ins select nothing")
def test_given_name_is_the_one_that_only_matches() -> None:
    @checkpointable(name="projection")
    def named(x: torch.Tensor) -> torch.Tensor:
        meters.tick("named")
        return torch.tanh(x * x)

    x = batch()
    for pattern, times in (("projection", 2), ("*ject*", 2)):
        with meters.count_forwards() as counter:
            with policy(segment=1, only=pattern):
                y = named(x)
            y.sum().backward()
        assert counter["named"] == times


@pytest.mark.skipif(ENGINE != "ckptdeco", reason="the stand-ins check nothing")
def test_functions_that_return_before_their_work_is_done_cannot_be_decorated() -> None:
    from ckptdeco.errors import PolicyError

    def generator() -> Iterator[int]:
        yield 1

    async def coroutine() -> None:
        pass

    for unfit in (generator, coroutine):
        with pytest.raises(PolicyError, match="before its work is done"):
            checkpointable(unfit)
