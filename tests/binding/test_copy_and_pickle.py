"""deepcopy, pickle, torch.save: a copy calls its own weights, names and keys stay."""

from __future__ import annotations

import copy
import functools
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.support import meters
from tests.support.bound import Bare, Chain, DecoratesAgain, Inherits, Kinds, function
from tests.support.layers import DIM, batch
from tests.support.subject import ENGINE, checkpointable, policy

RUNS = {"none": 1}.get(ENGINE, 2)


def by_pickle(value: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(value))


def by_torch_save(value: nn.Module) -> nn.Module:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIES: list[Callable[[nn.Module], nn.Module]] = [copy.deepcopy, by_pickle, by_torch_save]


def assert_independent(original: nn.Module, other: nn.Module, label: str) -> None:
    """The copy gives the same, is recomputed, and its gradients are its own."""
    x = batch(requires_grad=False)
    with policy(segment=2):
        assert torch.equal(original(x), other(x))
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    expected = other(x)
    assert not torch.equal(expected, original(x))
    original.zero_grad()
    with meters.count_forwards() as counter:
        with policy(segment=2):
            y = other(x)
        assert torch.equal(y, expected)
        y.sum().backward()
    assert counter[label] % RUNS == 0
    assert counter[label] >= RUNS
    assert all(p.grad is None for p in original.parameters()), "the copy called the original"
    assert all(p.grad is not None for p in other.parameters())


@pytest.mark.parametrize("make", COPIES)
@pytest.mark.parametrize("cls", [Kinds, Inherits, DecoratesAgain])
def test_module(make: Callable[[nn.Module], nn.Module], cls: type[Kinds]) -> None:
    original = Chain(cls(), cls())
    assert_independent(original, make(original), cls.__name__)


@pytest.mark.parametrize("make", COPIES)
def test_module_with_a_decorated_instance_attribute(make: Callable[[nn.Module], nn.Module]) -> None:
    original = Bare()
    original.forward = checkpointable(original.forward)
    assert_independent(original, make(original), "Bare")


@pytest.mark.parametrize("make", COPIES)
def test_model_whose_layers_have_decorated_instance_attributes(make: Callable[[nn.Module], nn.Module]) -> None:
    original = Chain(Bare(), Bare())
    for layer in original.layers:
        layer.forward = checkpointable(layer.forward)
    assert_independent(original, make(original), "Bare")


def test_shallow_copy_shares_the_weights() -> None:
    original = Kinds()
    other = copy.copy(original)
    assert other.weight is original.weight
    with policy(segment=1):
        assert torch.equal(other(batch()), other(batch())) is False
        other(batch()).sum().backward()
    assert original.weight.grad is not None


def test_decorated_function() -> None:
    weight, x = torch.randn(DIM, DIM), batch()
    for other in (pickle.loads(pickle.dumps(function)), copy.deepcopy(function), copy.copy(function)):
        with policy(segment=1):
            assert torch.equal(other(x, weight), function(x, weight))
    assert pickle.loads(pickle.dumps(function)) is function
    assert copy.deepcopy(function) is function, "functions are copied as they are"


def test_bound_methods_and_partials() -> None:
    layer = Kinds()
    other = pickle.loads(pickle.dumps(layer.forward))
    assert other.__self__ is not layer
    assert torch.equal(other.__self__.weight, layer.weight)
    partial = pickle.loads(pickle.dumps(functools.partial(function, batch())))
    assert partial.func is function


def test_model_copied_under_an_active_policy_and_between_forward_and_backward() -> None:
    model, x = Chain(Kinds(), Kinds()), batch()
    with policy(segment=2):
        y = model(x)
        other = copy.deepcopy(model)
        y.sum().backward()
        z = other(x)
    z.sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.grad, two.grad)


def test_deepcopied_after_a_step_and_trained_on_its_own() -> None:
    model, x = Chain(Kinds(), Kinds()), batch()
    with policy(segment=2):
        model(x).sum().backward()
    model.zero_grad()
    assert_independent(model, copy.deepcopy(model), "Kinds")


def test_state_dict_keys_and_parameter_names_are_unchanged() -> None:
    model = Chain(Kinds(), Bare())
    keys = ["layers.0.weight", "layers.1.weight"]
    model.layers[1].forward = checkpointable(model.layers[1].forward)
    with policy(segment=2):
        assert list(model.state_dict()) == keys
        model(batch()).sum().backward()
        assert list(model.state_dict()) == keys
    assert [name for name, _ in model.named_parameters()] == keys
    assert [name for name, _ in model.named_modules()] == ["", "layers", "layers.0", "layers.1"]
    model.load_state_dict(Chain(Kinds(), Bare()).state_dict(), strict=True)


def test_nothing_is_left_on_the_module() -> None:
    layer = Kinds()
    before = set(vars(layer))
    with policy(segment=1):
        layer(batch()).sum().backward()
    assert set(vars(layer)) == before


def test_isinstance_and_issubclass() -> None:
    layer = Inherits()
    assert type(layer) is Inherits
    assert isinstance(layer, (Kinds, nn.Module))
    assert issubclass(Inherits, Kinds)
