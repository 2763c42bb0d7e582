"""What a layer keeps on itself from call to call is changed once a call, whenever it starts to keep it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layers import DIM, Layer, Stack
from tests.support.oracle import total
from tests.support.subject import checkpointable


def _add_to_tensor(layer: Remembers) -> float:
    layer.tensor.add_(1)
    return layer.tensor.item()


def _replace_tensor(layer: Remembers) -> float:
    layer.tensor = layer.tensor * 2 + 1
    return layer.tensor.item()


def _append_to_list(layer: Remembers) -> float:
    layer.list.append(1)
    return len(layer.list)


def _count_in_dict(layer: Remembers) -> float:
    layer.dict["n"] = layer.dict.get("n", 0) + 1
    return layer.dict["n"]


def _append_to_list_in_dict(layer: Remembers) -> float:
    layer.dict.setdefault("seen", []).append(2)
    return sum(layer.dict["seen"])


def _write_into_tensor_in_list(layer: Remembers) -> float:
    layer.tensors[0].add_(0.5)
    return layer.tensors[0].item()


def _add_to_set(layer: Remembers) -> float:
    layer.set.add(len(layer.set))
    return len(layer.set)


def _add_to_number(layer: Remembers) -> float:
    layer.number += 1
    return layer.number


def _next_of_iterator(layer: Remembers) -> float:
    return next(layer.iterator)


def _make_attribute(layer: Remembers) -> float:
    layer.made = getattr(layer, "made", 0) + 1
    return layer.made


def _write_on_submodule(layer: Remembers) -> float:
    layer.linear.n_seen = getattr(layer.linear, "n_seen", 0) + 1
    return layer.linear.n_seen


HABITS = (
    _add_to_tensor,
    _replace_tensor,
    _append_to_list,
    _count_in_dict,
    _append_to_list_in_dict,
    _write_into_tensor_in_list,
    _add_to_set,
    _add_to_number,
    _next_of_iterator,
    _make_attribute,
    _write_on_submodule,
)


class Remembers(Layer):
    def __init__(self, habit: Callable[[Remembers], float]) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.habit = habit
        self.tensor, self.tensors, self.number = torch.zeros(1), [torch.zeros(1)], 0
        self.list: list[int] = []
        self.dict: dict[str, Any] = {}
        self.set: set[int] = set()
        if habit is _next_of_iterator:  # its calls are stored
            self.iterator = iter(range(99))

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        return self.out(h / (1 + self.habit(self)) if begun else h)

    def memory(self) -> list[Any]:
        made = getattr(self, "made", 0), getattr(self.linear, "n_seen", 0), sorted(self.set)
        return [self.tensor, self.tensors, self.number, self.list, self.dict, *made]


def _step(model: Stack, inputs: Any, context: Any) -> Any:
    with context():
        out = model(*inputs)
        total(out).backward()
    return out, [layer.memory() for layer in model.layers]


@pytest.mark.parametrize("habit", HABITS, ids=lambda habit: habit.__name__.strip("_"))
def test_what_a_layer_keeps_on_itself_changes_once_a_call(habit: Any, exact_from: Any) -> None:
    exact_from(lambda: Stack([Remembers(habit) for _ in range(4)]), _step)


class BorrowsDropoutRate(Layer):
    """Sets an attribute of a submodule for a while, with no `finally`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(DIM, DIM), nn.Dropout(0.5)

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = self.drop(self.linear(x))
        if begun:
            rate, self.drop.p = self.drop.p, 0.1
            h = self.drop(h)
            self.drop.p = rate
        return h


def test_attribute_of_a_submodule_set_for_a_while_is_back_after_backward(exact_from: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        total(out).backward()
        return out, [layer.drop.p for layer in model.layers]

    exact_from(lambda: Stack([BorrowsDropoutRate() for _ in range(4)]), step)


def test_two_forwards_before_backward_remember_in_the_order_of_forward(exact_from: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        with context():
            one, two = model(*inputs), model(*inputs)
        (total(one) + 2 * total(two)).backward()
        return one, two, [layer.memory() for layer in model.layers]

    exact_from(lambda: Stack([Remembers(_add_to_tensor), Remembers(_append_to_list), Remembers(_count_in_dict)]), step)
