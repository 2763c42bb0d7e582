"""Name, signature, source, annotations and hooks of what is decorated stay as they were."""

from __future__ import annotations

import functools
import inspect
import typing

import pytest
import torch

from tests.support import bound, meters
from tests.support.bound import Bare, Kinds, function, undecorated
from tests.support.layers import batch
from tests.support.subject import checkpointable, policy

METADATA = [
    name for name in functools.WRAPPER_ASSIGNMENTS if name not in ("__name__", "__qualname__", "__type_params__")
]


@pytest.mark.parametrize("attribute", METADATA)
def test_metadata_of_a_function(attribute: str) -> None:
    assert getattr(function, attribute) == getattr(undecorated, attribute)


def test_names() -> None:
    assert (function.__name__, function.__qualname__) == ("function", "function")
    assert (Kinds.forward.__name__, Kinds.forward.__qualname__) == ("forward", "Kinds.forward")
    assert Kinds().forward.__name__ == "forward"
    assert Kinds().forward.__doc__ == "The forward of Kinds."
    assert Kinds.of_class.__doc__ == "A class method decorated from outside."


def test_signature() -> None:
    assert inspect.signature(function) == inspect.signature(undecorated)
    assert list(inspect.signature(Kinds.forward).parameters) == ["self", "x", "scale"]
    assert list(inspect.signature(Kinds().forward).parameters) == ["x", "scale"]
    assert list(inspect.signature(Kinds.of_class).parameters) == ["x", "weight"]
    assert list(inspect.signature(Kinds.static).parameters) == ["x", "weight"]
    assert inspect.getfullargspec(Kinds.forward).args == ["self", "x", "scale"]
    assert typing.get_type_hints(function)["scale"] is float


def test_source_and_module() -> None:
    source = inspect.getsource(function)
    assert source.startswith("@checkpointable\ndef function(")
    assert "meters.tick(self.label)" in inspect.getsource(Kinds.forward)
    assert "def other" in inspect.getsource(Kinds().other)
    assert inspect.getsourcefile(function) == bound.__file__
    assert inspect.getmodule(function) is bound
    assert inspect.unwrap(function).__code__.co_name == "function"


def test_kind() -> None:
    layer = Kinds()
    assert callable(function)
    assert inspect.ismethod(layer.forward)
    assert layer.forward.__self__ is layer
    assert layer.forward.__func__ is not None
    assert not inspect.iscoroutinefunction(function)
    assert inspect.isroutine(function)
    assert isinstance(inspect.getattr_static(Kinds, "of_class_inside"), classmethod)


def test_bound_methods_compare_and_hash_as_methods_do() -> None:
    one, two = Kinds(), Kinds()
    assert one.forward == one.forward
    assert one.forward != two.forward
    assert hash(one.forward) == hash(one.forward)


def test_forward_defined_in_a_class_is_found_by_tools() -> None:
    assert "forward" in vars(Kinds)
    assert Kinds.forward is not Bare.forward
    assert Kinds().extra_repr() == ""
    assert repr(Kinds()) == "Kinds()"


def test_hooks_of_the_module_run_once() -> None:
    layer, seen = Kinds(), []
    layer.register_forward_pre_hook(lambda *_: seen.append("pre"))
    layer.register_forward_hook(lambda *_: seen.append("post"))
    layer.register_full_backward_hook(lambda *_: seen.append("backward"))
    with policy(segment=1):
        y = layer(batch())
    y.sum().backward()
    assert seen == ["pre", "post", "backward"]


def test_no_effect_without_a_policy() -> None:
    layer = Kinds()
    with meters.count_forwards() as counter:
        layer(batch()).sum().backward()
    assert counter["Kinds"] == 1


def test_attributes_of_the_function_are_visible_and_can_be_set() -> None:
    def plain(x: torch.Tensor) -> torch.Tensor:
        return x

    plain.marker = 3  # type: ignore[attr-defined]
    decorated = checkpointable(plain)
    assert decorated.marker == 3
    decorated.other = 4
    assert decorated.other == 4


def test_abstract_and_property_like_use() -> None:
    import abc

    class Abstract(abc.ABC):
        @checkpointable
        @abc.abstractmethod
        def run(self, x: torch.Tensor) -> torch.Tensor: ...

    with pytest.raises(TypeError, match="abstract"):
        Abstract()  # type: ignore[abstract]


def test_wrong_arguments_raise_what_the_function_raises() -> None:
    layer = Kinds()
    for context in (policy(None), policy(segment=1)):
        with context:
            with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
                layer()
            with pytest.raises(TypeError, match="unexpected keyword argument 'nonsense'"):
                layer(batch(), nonsense=1)
