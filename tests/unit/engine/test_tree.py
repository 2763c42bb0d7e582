"""Arguments taken apart and put together again: containers as at entry, no constructor called (R3, C7)."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict, namedtuple
from typing import Any

import pytest
import torch

from ckptdeco.engine.tree import flatten, flatten_arguments, path_of, rebuild, rebuild_arguments, tensors_in

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Counting:
    value: Any
    n_made = 0

    def __post_init__(self) -> None:
        type(self).n_made += 1


class StrictDict(dict):  # type: ignore[type-arg]
    """As the outputs of transformers: its constructor and `__init__` refuse to be called empty."""

    def __init__(self, *, required: torch.Tensor) -> None:
        super().__init__(value=required)
        self.note = "kept"


class StrictTuple(tuple):  # type: ignore[type-arg]
    def __new__(cls, left: Any, right: Any) -> StrictTuple:
        if cls.refuses:
            raise AssertionError("a constructor was called")
        return super().__new__(cls, (left, right))

    refuses = False


def round_trip(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    template = flatten(value, tensors)
    return rebuild(template, tensors)


@pytest.mark.parametrize(
    "make",
    [
        lambda t: (t, 1, "a"),
        lambda t: [t, [t, {"k": t}], None],
        lambda t: {"a": t, 3: [t]},
        lambda t: OrderedDict([("b", t), ("a", t)]),
        lambda t: Pair(t, [t]),
    ],
)
def test_containers_come_back_equal_and_of_the_same_type(make: Any) -> None:
    tensor = torch.randn(2)
    value = make(tensor)
    again = round_trip(value)
    assert type(again) is type(value)
    assert repr(again) == repr(value)
    assert all(found is tensor for found in tensors_in(again))


def test_no_constructor_of_a_dataclass_is_called() -> None:
    value = Counting(torch.randn(2))
    before = Counting.n_made
    again = round_trip(value)
    assert Counting.n_made == before
    assert again is not value
    assert again.value is value.value


def test_no_constructor_of_a_mapping_that_refuses_is_called() -> None:
    value = StrictDict(required=torch.randn(2))
    again = round_trip(value)
    assert type(again) is StrictDict
    assert again.note == "kept"
    assert again["value"] is value["value"]


def test_no_constructor_of_a_tuple_subclass_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    value = StrictTuple(torch.randn(2), 1)
    monkeypatch.setattr(StrictTuple, "refuses", True)
    again = round_trip(value)
    assert type(again) is StrictTuple
    assert again[0] is value[0]


def test_default_factory_survives() -> None:
    value: Any = defaultdict(list, {"a": torch.randn(2)})
    assert round_trip(value).default_factory is list


def test_containers_come_back_as_at_entry_although_the_layer_changed_them() -> None:
    first, second = torch.randn(2), torch.randn(2)
    values, mapping, value = [first], {"a": first}, Counting(first)
    tensors, template = flatten_arguments((values, mapping), {"c": value})
    values.append(second)
    mapping["b"] = second
    value.value = second
    (again, again_mapping), kwargs = rebuild_arguments(template, list(tensors))
    assert len(again) == 1
    assert list(again_mapping) == ["a"]
    assert kwargs["c"].value is first


def test_each_rebuild_gives_containers_of_its_own() -> None:
    tensors, template = flatten_arguments(([torch.randn(2)],), {})
    (one,), _ = rebuild_arguments(template, list(tensors))
    one.clear()
    (other,), _ = rebuild_arguments(template, list(tensors))
    assert len(other) == 1


def test_template_holds_no_tensor() -> None:
    """R27: the template of a call lives as long as the call."""
    import gc
    import weakref

    tensor = torch.randn(2)
    gone = weakref.ref(tensor)
    value: list[Any] = [[tensor], {"a": tensor}, (tensor,), Counting(tensor), StrictDict(required=tensor)]
    tensors: list[torch.Tensor] = []
    template = flatten(value, tensors)
    del tensor, value, tensors
    gc.collect()
    assert gone() is None
    del template


def test_a_cycle_ends() -> None:
    loop: list[Any] = [torch.randn(2)]
    loop.append(loop)
    tensors: list[torch.Tensor] = []
    template = flatten(loop, tensors)
    again = rebuild(template, tensors)
    assert again[0] is loop[0]
    assert again[1][1][0] is loop[0]


def test_what_is_nested_too_deep_is_passed_on_as_it_is() -> None:
    inner: Any = [torch.randn(2)]
    value = inner
    for _ in range(40):
        value = [value]
    again = round_trip(value)
    for _ in range(40):
        again = again[0]
    assert again is inner


def test_other_objects_and_tuples_without_tensors_stand_for_themselves() -> None:
    thing, pair = object(), (1, "a")
    again = round_trip([thing, pair, {"a": 1}])
    assert again[0] is thing
    assert again[1] is pair


def test_all_tensors_by_position_need_no_tree() -> None:
    a, b = torch.randn(2), torch.randn(2)
    tensors, template = flatten_arguments((a, b), {})
    args, kwargs = rebuild_arguments(template, tensors)
    assert args[0] is a
    assert args[1] is b
    assert kwargs == {}


def test_path_names_the_place_of_a_tensor() -> None:
    a, b, c, d = (torch.randn(2) for _ in range(4))
    _, template = flatten_arguments(([a, {"mask": b}], Counting(c)), {"bias": (d,)})
    paths = [path_of(template, i) for i in range(5)]
    assert paths == ["[0][0][0]", "[0][0][1]['mask']", "[0][1].value", "[1]['bias'][0]", None]
    assert path_of(flatten_arguments((a, b), {})[1], 1) == "[0][1]"


def test_paths_of_a_whole_call_are_those_of_its_tensors() -> None:
    tensors, template = flatten_arguments((torch.randn(2),), {"mask": torch.randn(3)})
    assert [path_of(template, i) for i in range(len(tensors))] == ["[0][0]", "[1]['mask']"]
