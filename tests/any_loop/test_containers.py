"""Nested containers, dataclasses, dicts, OrderedDict subclasses and namedtuples as inputs and outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.support import meters
from tests.support.layers import DIM, DictLayer, Hidden, Layer, Loop, Pair, PairLayer, State, batch
from tests.support.oracle import assert_same, forward_backward
from tests.support.subject import checkpointable


def test_layers_that_return_tuples(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for layer in m.layers:
            x, y = layer(x, y)
        return x, y

    assert_same(
        lambda: Loop([PairLayer() for _ in range(6)], loop), forward_backward, lambda: (batch(), batch()), under
    )


def test_only_one_output_of_a_tuple_is_used(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x, x * 2)[0]
        return x

    assert_same(lambda: Loop([PairLayer() for _ in range(5)], loop), forward_backward, lambda: (batch(),), under)


def test_dict_in_and_out(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, gate: torch.Tensor) -> Any:
        state = {"h": x, "gate": gate, "seen": [], "n": 0}
        for layer in m.layers:
            state = layer(state)
        assert state["n"] == len(m.layers)
        return state["h"], state["seen"]

    assert_same(
        lambda: Loop([DictLayer() for _ in range(5)], loop), forward_backward, lambda: (batch(), batch()), under
    )


class DataclassLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.aux = nn.Linear(DIM, DIM), nn.Linear(DIM, 1)

    @checkpointable
    def forward(self, state: Hidden) -> Hidden:
        meters.tick(self.label)
        h = torch.tanh(self.linear(state.h)) + state.pair.h
        return Hidden(h, Pair(self.aux(h), None), {"n": state.info["n"] + 1, "sq": [h.square()]})


def test_dataclass_in_and_out(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> Any:
        state = Hidden(x, Pair(x[:, :1], None), {"n": 0, "sq": []})
        kept = []
        for layer in m.layers:
            state = layer(state)
            assert type(state) is Hidden
            assert type(state.pair) is Pair
            assert state.pair.extra is None
            assert state.h.requires_grad
            kept.append(state.info["sq"][0].sum())
        assert state.info["n"] == len(m.layers)
        return state.h, state.pair.h, kept

    assert_same(lambda: Loop([DataclassLayer() for _ in range(5)], loop), forward_backward, lambda: (batch(),), under)


class StateLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, state: State, extra: Pair) -> State:
        return State(
            h=torch.tanh(self.linear(state.h)) * extra.h, past=(state.h.mean(), {"deep": [state.h.sum(-1)]}), none=None
        )


def test_ordered_dict_subclass_and_namedtuple(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> Any:
        state = State(h=x, past=None, none=None)
        for layer in m.layers:
            state = layer(state, extra=Pair(y, "text"))
            assert type(state) is State
            assert list(state) == ["h", "past", "none"]
        return state["h"], state.past

    assert_same(
        lambda: Loop([StateLayer() for _ in range(5)], loop), forward_backward, lambda: (batch(), batch()), under
    )


class ListLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, xs: list[Any]) -> list[Any]:
        (a, (b, named)), flag = xs
        c = named["c"]
        return [(torch.tanh(self.linear(a)), [b + a, {"c": c * b}]), not flag]


def test_nested_lists_tuples_and_dicts(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor, y: torch.Tensor) -> Any:
        xs: list[Any] = [(x, [y, {"c": x * y}]), True]
        for layer in m.layers:
            xs = layer(xs)
            assert isinstance(xs[0], tuple)
        return xs[0]

    assert_same(
        lambda: Loop([ListLayer() for _ in range(5)], loop), forward_backward, lambda: (batch(), batch()), under
    )


class MixedOutputs(Layer):
    """Returns the input itself, an integer tensor, None, a string and a tensor without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        h = torch.tanh(self.linear(x))
        return h, x, h.argmax(-1), None, "text", h.detach().sum(), 3


def test_mixed_outputs(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> Any:
        out: list[Any] = []
        for layer in m.layers:
            h, same, index, nothing, text, plain, three = layer(x)
            assert same is x
            assert (nothing, text, three) == (None, "text", 3)
            assert not plain.requires_grad
            assert not index.requires_grad
            x = h + same
            out += [index, plain]
        return x, out

    assert_same(lambda: Loop([MixedOutputs() for _ in range(5)], loop), forward_backward, lambda: (batch(),), under)
