"""What a layer stores on itself or on an argument keeps nothing of earlier steps alive."""

from __future__ import annotations

import contextlib
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.layers import DIM, Layer
from tests.support.subject import checkpointable

N_STEPS = 7


class StoresStatistic(Layer):
    """Stores a tensor of the graph on itself at each call, which the loss does not use."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(DIM, DIM), how
        self.stats: Any = None

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        energy = h.square().mean()
        self.stats = {"tensor": energy, "dict": {"energy": energy}, "list": [energy], "none": None}[self.how]
        return h


class Note:
    """An object that layers write on."""


class WritesOnArgument(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, note: Note) -> torch.Tensor:
        note.h = torch.tanh(self.linear(x))
        return note.h * 2


def _inputs_alive(layers: list[nn.Module], context: Any, *, is_noted: bool, has_backward: bool) -> int:
    """How many of the steps' inputs are alive after the last step."""
    alive = []
    for _ in range(N_STEPS):
        x = torch.randn(4, DIM)
        alive.append(weakref.ref(x.untyped_storage()))
        y, note = x, [Note()] if is_noted else []
        with context:
            for layer in layers:
                y = layer(y, *note)
        if has_backward:
            y.sum().backward()
        del x, y, note
    gc.collect()
    return sum(ref() is not None for ref in alive)


@pytest.mark.parametrize("has_backward", [True, False], ids=["backward", "no_backward"])
@pytest.mark.parametrize("how", ["tensor", "dict", "list"])
def test_what_a_layer_stores_on_itself_keeps_no_more_inputs_alive_than_the_last_one(
    how: str, has_backward: bool, under: Any
) -> None:
    """One may be alive: the graph of the last step's statistic, or of the first call (see limits.md)."""
    layers: list[nn.Module] = [StoresStatistic(how) for _ in range(3)]
    plain = _inputs_alive(layers, contextlib.nullcontext(), is_noted=False, has_backward=has_backward)
    assert plain <= 1
    assert _inputs_alive(layers, under(), is_noted=False, has_backward=has_backward) <= 2


@pytest.mark.parametrize("has_backward", [True, False], ids=["backward", "no_backward"])
def test_layers_that_store_nothing_keep_no_input_alive(has_backward: bool, under: Any) -> None:
    layers: list[nn.Module] = [StoresStatistic("none") for _ in range(3)]
    assert _inputs_alive(layers, under(), is_noted=False, has_backward=has_backward) == 0


def test_tensor_written_on_an_argument_keeps_no_input_alive_after_backward(under: Any) -> None:
    assert _inputs_alive([WritesOnArgument() for _ in range(2)], under(), is_noted=True, has_backward=True) == 0


def test_tensor_written_on_an_argument_keeps_no_input_alive_without_backward(under: Any) -> None:
    assert _inputs_alive([WritesOnArgument() for _ in range(2)], under(), is_noted=True, has_backward=False) == 0


def _is_model_freed(how: str, context: Any) -> bool:
    layers: list[nn.Module] = [StoresStatistic(how) for _ in range(2)]
    _inputs_alive(layers, context, is_noted=False, has_backward=True)
    refs = [weakref.ref(layer) for layer in layers]
    layers.clear()
    gc.collect()
    return all(ref() is None for ref in refs)


@pytest.mark.parametrize("how", ["tensor", "dict", "list", "none"])
def test_plain_model_is_freed(how: str) -> None:
    assert _is_model_freed(how, contextlib.nullcontext())


def test_model_that_stores_nothing_is_freed(under: Any) -> None:
    assert _is_model_freed("none", under())


@pytest.mark.xfail(
    strict=True,
    reason="limits.md, a layer's first call: what it stores on itself holds that call's saved tensors, and these the "
    "layer, where no collector looks",
)
@pytest.mark.parametrize("how", ["tensor", "dict", "list"])
def test_model_that_stores_a_tensor_of_its_graph_is_freed(how: str, under: Any) -> None:
    assert _is_model_freed(how, under())


class Watches(Layer):
    """Gives a method of its own as a hook, to itself, to a module inside or to a weight: it then leads to itself."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.n = 0
        if where == "weight":
            self.linear.weight.register_hook(self.watch)
        else:
            (self if where == "self" else self.linear).register_forward_hook(self.watch)

    def watch(self, *args: Any) -> None:
        self.n += 1

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize("where", ["self", "inside", "weight"])
def test_layer_that_is_its_own_hook_is_freed(where: str, under: Any) -> None:
    layers = nn.ModuleList(Watches(where) for _ in range(3))
    alive = [weakref.ref(layer) for layer in layers]
    for _ in range(3):
        y = torch.randn(4, DIM)
        with under():
            for layer in layers:
                y = layer(y)
        y.sum().backward()
    del layers, layer, y
    gc.collect()
    assert not any(reference() is not None for reference in alive)
