"""Layers that change what they are given: tensors, views, containers, objects, the caches of transformers."""

from __future__ import annotations

import collections
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.support.flights import all_flights, state_of
from tests.support.layers import DIM, Layer, Loop, Stack, Stem, batch
from tests.support.oracle import assert_same, total
from tests.support.subject import checkpointable


class Changes(Layer):
    """Calls what it is given on its input, then goes on with it."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(DIM, DIM), change

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(x)
        return torch.tanh(self.linear(x)) + x


def _index_put(x: torch.Tensor) -> None:
    x.index_put_((torch.tensor([0, 1]),), torch.ones(DIM), accumulate=True)


def _assign(x: torch.Tensor) -> None:
    x[0] = 0.5 * x[1]


def _mask(x: torch.Tensor) -> None:
    x.masked_fill_(x > 0.3, 0.1)


def _transposed(x: torch.Tensor) -> None:
    x.t()[0].mul_(0.5)


def _viewed(x: torch.Tensor) -> None:
    x.view(-1)[::2].tanh_()


def _chunk(x: torch.Tensor) -> None:
    x[:, : DIM // 2].relu_()


def _in_no_grad(x: torch.Tensor) -> None:
    with torch.no_grad():
        x.mul_(0.9)


def _data(x: torch.Tensor) -> None:
    x.data.mul_(0.9)


def _detached(x: torch.Tensor) -> None:
    x.detach().clamp_(-1, 1)


def _numpy(x: torch.Tensor) -> None:
    array = x.detach().numpy()
    array *= 0.9


def _out(x: torch.Tensor) -> None:
    with torch.no_grad():
        torch.mul(x, 0.9, out=x)


def _foreach(x: torch.Tensor) -> None:
    torch._foreach_mul_([x], 0.9)


def _copy(x: torch.Tensor) -> None:
    x.copy_(x.roll(1, 0))


def _scatter(x: torch.Tensor) -> None:
    x.scatter_add_(1, torch.zeros(len(x), 1, dtype=torch.long), torch.ones(len(x), 1))


def _dropout(x: torch.Tensor) -> None:
    functional.dropout(x, 0.4, inplace=True)


CHANGES = (
    _index_put, _assign, _mask, _transposed, _viewed, _chunk, _in_no_grad, _data, _detached, _numpy, _out, _foreach,
    _copy, _scatter, _dropout,
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__.strip("_"))
def test_input_changed_in_place(change: Any, same: Any) -> None:
    same(lambda: Stem(Stack([Changes(change) for _ in range(5)])), all_flights, steps=2)


@pytest.mark.parametrize("change", [_index_put, _viewed, _in_no_grad, _numpy], ids=lambda f: f.__name__.strip("_"))
def test_view_of_a_tensor_changed_in_place(change: Any, same: Any) -> None:
    """The input of each layer is a view; the rest of its base is used afterwards."""

    def loop(model: Loop, x: torch.Tensor) -> Any:
        h = x * 2
        for layer in model.layers:
            both = torch.cat([h, 2 * h])
            h = layer(both[: len(x)]) + both.mean()
        return h

    same(lambda: Loop([Changes(change) for _ in range(5)], loop), all_flights, steps=2)


class ChangesUnlessLeaf(Layer):
    """Works in place where that is allowed: not on a leaf that requires grad."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(x) if x.is_leaf and x.requires_grad else x.mul_(0.9)
        return h + torch.tanh(self.linear(h)) * 0.5


def test_input_changed_in_place_unless_it_is_a_leaf(under: Any) -> None:
    def step(model: Any, inputs: Any, context: Any) -> Any:
        with context():
            out = model(model(inputs[0].detach().requires_grad_()) * 1.0)
        total(out).backward()
        return out

    assert_same(lambda: Stack([ChangesUnlessLeaf()]), step, lambda: (batch(),), under, steps=4)


class Buffered(Layer):
    """Writes its result into a tensor that the caller gives."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, out: torch.Tensor, i: int) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        with torch.no_grad():
            torch.add(out[i], h.detach(), out=out[i])
        return h + out.sum(0)


def test_tensor_given_to_be_filled(same: Any) -> None:
    def loop(model: Loop, x: torch.Tensor) -> Any:
        out = torch.zeros(5, *x.shape)
        for i, layer in enumerate(model.layers):
            x = layer(x, out, i)
        return x, out

    same(lambda: Loop([Buffered() for _ in range(5)], loop), all_flights, steps=2)


@dataclasses.dataclass
class Scratch:
    values: list[torch.Tensor]
    n: int = 0


class Context:
    """An ordinary object."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.by_name: dict[str, Any] = {"sum": 0.0, "inner": {"n": 0}}
        self.scratch = Scratch([])
        self.n = 0


class Slots:
    """An object without a dictionary."""

    __slots__ = ("n", "values")

    def __init__(self) -> None:
        self.n = 0
        self.values: list[torch.Tensor] = []


class Keeper:
    """An object that refuses to be copied."""

    def __init__(self) -> None:
        self.n = 0
        self.values: list[torch.Tensor] = []

    def __copy__(self) -> Any:
        raise TypeError("not to be copied")

    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("not to be copied")


def _to_list(given: list[Any], h: torch.Tensor) -> torch.Tensor:
    given.append(h)
    return sum(given[:-1], torch.zeros(())) + len(given)


def _to_dict(given: dict[Any, Any], h: torch.Tensor) -> torch.Tensor:
    given[len(given)] = h
    return sum(list(given.values())[:-1], torch.zeros(())) + len(given)


def _to_nested(given: dict[str, Any], h: torch.Tensor) -> torch.Tensor:
    given.setdefault("a", [[]])[0].append(h.detach())
    given["n"] = given.get("n", 0) + 1
    return torch.stack(given["a"][0]).sum(0) * given["n"]


def _to_deque(given: Any, h: torch.Tensor) -> torch.Tensor:
    given.append(h.detach())
    return sum(given) * len(given)


def _to_set(given: set[int], h: torch.Tensor) -> torch.Tensor:
    given.add(len(given))
    return h * len(given)


def _to_dataclass(given: Scratch, h: torch.Tensor) -> torch.Tensor:
    given.values.append(h.detach())
    given.n += 1
    return torch.stack(given.values).sum(0) * given.n


def _to_object(given: Context, h: torch.Tensor) -> torch.Tensor:
    given.n += 1
    given.keys.append(h)
    given.by_name["sum"] = given.by_name["sum"] + h.detach()
    given.by_name["inner"]["n"] += 1
    given.scratch.n += 1
    n = given.n + given.by_name["inner"]["n"] + given.scratch.n
    return sum(given.keys[:-1], torch.zeros(())) * n + given.by_name["sum"]


def _to_object_in_place(given: Context, h: torch.Tensor) -> torch.Tensor:
    if not given.keys:
        given.keys.append(torch.zeros(h.shape))
    given.keys[0].add_(h.detach())
    return given.keys[0] * 2


def _to_slots(given: Any, h: torch.Tensor) -> torch.Tensor:
    given.n += 1
    given.values.append(h.detach())
    return torch.stack(given.values).sum(0) * given.n


class SlotsAndMore(Slots):
    """With slots and a dictionary."""


def _to_array(given: Any, h: torch.Tensor) -> torch.Tensor:
    given[0] += 1
    given *= 1.5
    return h * float(given[0])


def _to_python_generator(given: random.Random, h: torch.Tensor) -> torch.Tensor:
    return h * given.random()


def _to_numpy_generator(given: Any, h: torch.Tensor) -> torch.Tensor:
    return h * float(given.random())


def _to_counter(given: Any, h: torch.Tensor) -> torch.Tensor:
    given.update(["a", "b"])
    return h * given["a"]


def _to_bytes(given: bytearray, h: torch.Tensor) -> torch.Tensor:
    given.append(len(given))
    return h * len(given)


GIVEN: dict[str, tuple[Callable[[], Any], Callable[[Any, torch.Tensor], torch.Tensor]]] = {
    "list": (list, _to_list),
    "dict": (dict, _to_dict),
    "nested": (dict, _to_nested),
    "defaultdict": (lambda: collections.defaultdict(list), _to_dict),
    "deque": (lambda: collections.deque(maxlen=2), _to_deque),
    "set": (set, _to_set),
    "dataclass": (lambda: Scratch([]), _to_dataclass),
    "object": (Context, _to_object),
    "object, tensor in place": (Context, _to_object_in_place),
    "object with slots": (Slots, _to_slots),
    "object with slots and more": (SlotsAndMore, _to_slots),
    "array": (lambda: numpy.zeros(2), _to_array),
    "list of arrays": (lambda: [numpy.zeros(2)], lambda given, h: _to_array(given[0], h)),
    "generator of Python": (lambda: random.Random(3), _to_python_generator),
    "generator of NumPy": (lambda: numpy.random.default_rng(3), _to_numpy_generator),
    "old generator of NumPy": (lambda: numpy.random.RandomState(3), lambda given, h: h * given.rand()),
    "counter": (collections.Counter, _to_counter),
    "bytes": (bytearray, _to_bytes),
    "object that cannot be copied": (Keeper, _to_slots),
}


class Adds(Layer):
    """Adds what it computed to what it is given, and reads that."""

    def __init__(self, add: Any) -> None:
        super().__init__()
        self.linear, self.add = nn.Linear(DIM, DIM), add

    @checkpointable
    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        return h * (1 + torch.sin(self.add(given, h)))


class AddsFromKeyword(Adds):
    @checkpointable
    def forward(self, x: torch.Tensor, *, given: Any) -> torch.Tensor:
        return super().forward(x, given)


@pytest.mark.parametrize("kind", [Adds, AddsFromKeyword], ids=["position", "keyword"])
@pytest.mark.parametrize("name", GIVEN)
def test_objects_that_all_layers_change(name: str, kind: Any, same: Any) -> None:
    make, add = GIVEN[name]

    def loop(model: Loop, x: torch.Tensor) -> Any:
        given = make()
        for layer in model.layers:
            x = layer(x, given=given)
        return x, repr(state_of(given))

    same(lambda: Loop([kind(add) for _ in range(5)], loop), all_flights, steps=2)


class Draws(Layer):
    """Takes numbers from an iterator."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, numbers: Any) -> torch.Tensor:
        source = numbers["numbers"] if isinstance(numbers, dict) else numbers
        return torch.tanh(self.linear(x)) * next(source)


class Counter:
    """An iterator of the user's own."""

    def __init__(self) -> None:
        self.n = 0

    def __iter__(self) -> Counter:
        return self

    def __next__(self) -> int:
        self.n += 1
        return self.n


ITERATORS = {
    "generator": lambda: (i for i in range(1, 99)),
    "list iterator": lambda: iter([*range(1, 99)]),
    "zip": lambda: map(sum, zip(range(1, 99), range(99), strict=False)),
    "own": Counter,
    "nested": lambda: {"numbers": iter(range(1, 99))},
}


@pytest.mark.parametrize("make", ITERATORS.values(), ids=ITERATORS)
def test_iterators_shared_by_all_layers(make: Any, same: Any) -> None:
    def loop(model: Loop, x: torch.Tensor) -> Any:
        numbers = make()
        for layer in model.layers:
            x = layer(x, numbers)
        return x

    same(lambda: Loop([Draws() for _ in range(5)], loop), all_flights, steps=2)
