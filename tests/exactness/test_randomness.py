"""Every source of random numbers gives backward what forward drew and ends where the plain run ends."""

from __future__ import annotations

import itertools
import random
import threading
from typing import Any

import numpy
import pytest
import torch
from torch import nn
from torch.nn import functional

from ckptdeco import is_recomputing
from ckptdeco.errors import RandomnessError
from tests.support.layers import DIM, Layer, Stack, batch
from tests.support.oracle import assert_same, seed_everything, total
from tests.support.subject import checkpointable


class DrawsFromGenerator(Layer):
    shared = torch.Generator()

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.where = where

    @checkpointable
    def forward(
        self, x: torch.Tensor, begun: bool, held: dict[str, Any], generator: torch.Generator | None = None
    ) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        if begun:
            found = generator or {"list": held["list"][0], "class": self.shared}[self.where]
            h = h * torch.rand(h.shape, generator=found)
        return self.out(h)


@pytest.mark.parametrize("where", ["keyword", "list", "class"])
def test_generator_draws_once_a_call_wherever_it_is_found(where: str, exact_from: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        x, begun = inputs
        DrawsFromGenerator.shared.manual_seed(1)
        generator = torch.Generator().manual_seed(2)
        with context():
            held = {"list": [generator]}
            out = model(x, begun, held, generator=generator if where == "keyword" else None)
        total(out).backward()
        return out, generator.get_state(), DrawsFromGenerator.shared.get_state()

    exact_from(lambda: Stack([DrawsFromGenerator(where) for _ in range(4)]), step)


class HoldsGenerators(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.generators: list[torch.Generator] = []

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        return self.out(h * torch.rand(h.shape, generator=self.generators[0]) if begun else h)


def test_generator_in_a_list_on_the_layer_goes_on_from_step_to_step(exact_from: Any) -> None:
    def step(model: Stack, inputs: Any, context: Any) -> Any:
        for i, layer in enumerate(model.layers):
            layer.generators = layer.generators or [torch.Generator().manual_seed(i)]
        with context():
            out = model(*inputs)
        total(out).backward()
        return out, [layer.generators[0].get_state() for layer in model.layers]

    exact_from(lambda: Stack([HoldsGenerators() for _ in range(4)]), step)


class Draws(Layer):
    """Stochastic depth that is switched on after a while."""

    def __init__(self, draw: Any) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.draw = draw

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        return self.out(h * self.draw(h) if begun else h)


TORCH_DRAWS = {
    "rand": lambda h: torch.rand_like(h),
    "dropout": lambda h: functional.dropout(torch.ones_like(h), 0.4),
    "bernoulli": lambda h: torch.bernoulli(torch.full_like(h, 0.5)),
    "host number": lambda h: torch.rand(()).item(),
    "permutation": lambda h: h[torch.randperm(len(h))].detach(),
}
HOST_DRAWS = {
    "random": lambda h: random.random(),
    "numpy": lambda h: float(numpy.random.rand()),
}


@pytest.mark.parametrize("draw", TORCH_DRAWS.values(), ids=TORCH_DRAWS)
def test_torch_draws_begun_at_any_call_are_those_of_forward(draw: Any, exact_from: Any) -> None:
    exact_from(lambda: Stack([Draws(draw) for _ in range(4)]))


def _assert_exact_from(first: int, draw: Any, under: Any) -> None:
    calls = itertools.count(1)
    build = lambda: Stack([Draws(draw) for _ in range(4)])  # noqa: E731

    def step(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        total(out).backward()
        return out

    assert_same(build, step, lambda: (batch(), next(calls) >= first), under, steps=7)


@pytest.mark.parametrize("draw", HOST_DRAWS.values(), ids=HOST_DRAWS)
@pytest.mark.parametrize("first", [1, 2, 3, 4, 7])
def test_host_draws_begun_at_any_call_are_those_of_forward(first: int, draw: Any, under: Any) -> None:
    _assert_exact_from(first, draw, under)


def make_host_generators() -> dict[str, Any]:
    return {
        "random.Random": random.Random(3),
        "default_rng": numpy.random.default_rng(3),
        "MT19937": numpy.random.Generator(numpy.random.MT19937(3)),
        "RandomState": numpy.random.RandomState(3),
    }


class Source:
    """What a configuration object looks like that has the generator somewhere."""

    def __init__(self, generator: Any) -> None:
        self.generator = generator


GLOBAL: dict[str, Any] = make_host_generators()


def _number(generator: Any) -> float:
    return float(generator.random() if hasattr(generator, "random") else generator.rand())


def _rewind(generator: Any) -> None:
    (fresh,) = [other for other in make_host_generators().values() if _bits(other) is _bits(generator)]
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = fresh.bit_generator.state
    elif isinstance(generator, random.Random):
        generator.setstate(fresh.getstate())
    else:
        generator.set_state(fresh.get_state())


def _bits(generator: Any) -> type:
    return type(getattr(generator, "bit_generator", generator))


def _global_number(kind: str) -> float:
    return _number(GLOBAL[kind])


class DrawsOnHost(Layer):
    def __init__(self, where: str, kind: str, sources: dict[str, Any]) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.where, self.kind = where, kind
        self.source = Source(sources[kind]) if where == "attribute" else None

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool, given: Any = None) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        if begun and self.where == "global":
            h = h * _global_number(self.kind)
        elif begun:
            h = h * _number(given if self.source is None else self.source.generator)
        return self.out(h)


@pytest.mark.parametrize("kind", make_host_generators())
@pytest.mark.parametrize("where", ["attribute", "argument", "global"])
@pytest.mark.parametrize("first", [1, 3])
def test_generator_objects_of_python_and_numpy_go_on_as_in_the_plain_run(
    first: int, where: str, kind: str, under: Any
) -> None:
    calls = itertools.count(1)

    def build() -> Stack:
        sources = make_host_generators()
        return Stack([DrawsOnHost(where, kind, sources) for _ in range(4)])

    def step(model: Stack, inputs: Any, context: Any) -> Any:
        x, begun = inputs
        given = make_host_generators()[kind]
        _rewind(GLOBAL[kind])
        with context():
            out = model(x, begun, given if where == "argument" else None)
        total(out).backward()
        used = {"argument": given, "global": GLOBAL[kind]}.get(where) or model.layers[0].source.generator
        return out, torch.tensor(_number(used))

    assert_same(build, step, lambda: (batch(), next(calls) >= first), under, steps=5)


MEANWHILE: list[Any] = []  # what happens during the next recompute


class Interrupted(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        if is_recomputing() and MEANWHILE:
            MEANWHILE[-1]()
        return self.out(h)


NUMBERS = {"torch": lambda: torch.rand(()).item(), "random": random.random, "numpy": numpy.random.rand}


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
def test_another_thread_that_draws_during_a_recompute_gets_its_own_numbers(number: Any, under: Any) -> None:
    """The layers draw nothing, so their recomputes touch no stream, and they are not taken for the culprit."""
    got: list[float] = []

    def draw_elsewhere() -> None:
        MEANWHILE.clear()
        thread = threading.Thread(target=lambda: got.append(number()))
        thread.start()
        thread.join()

    model = Stack([Interrupted() for _ in range(4)])
    inputs = [batch() for _ in range(3)]
    seed_everything(5)
    expected = [number() for _ in range(4)]
    seed_everything(5)
    for x in inputs:
        with under():
            out = model(x)
        MEANWHILE.append(draw_elsewhere)
        total(out).backward()
    got.append(number())
    assert got == expected


@pytest.mark.parametrize("number", NUMBERS.values(), ids=NUMBERS)
@pytest.mark.parametrize("first", [1, 3])
def test_layer_that_draws_in_its_recompute_only_is_an_error_at_any_call(first: int, number: Any, under: Any) -> None:
    model = Stack([Interrupted() for _ in range(4)])
    MEANWHILE.clear()
    for n in range(1, first + 1):
        with under():
            out = model(batch())
        if n < first:
            total(out).backward()
    MEANWHILE.append(number)
    with pytest.raises(RandomnessError):
        total(out).backward()
    MEANWHILE.clear()


SEEDS = {"torch": torch.manual_seed, "random": random.seed, "numpy": numpy.random.seed}


class SetsSeed(Layer):
    """Draws, then sets the seed itself and draws again: it leaves the stream as the layer before it did."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.out, self.kind = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), kind

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.linear(x)) * (1.0 + NUMBERS[self.kind]())
        SEEDS[self.kind](7)
        return self.out(torch.tanh(h) * NUMBERS[self.kind]())


@pytest.mark.parametrize("kind", NUMBERS)
def test_layer_that_sets_the_seed_itself_and_leaves_the_stream_as_it_found_it(kind: str, under: Any) -> None:
    def step(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        NUMBERS[kind]()  # the stream is elsewhere when backward begins
        total(out).backward()
        return out, torch.tensor(NUMBERS[kind]())

    assert_same(lambda: Stack([SetsSeed(kind) for _ in range(4)]), step, lambda: (batch(),), under, steps=4)


class MakesGenerator(Layer):
    """Makes a generator of its own when it first needs one."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.where, self.own = where, {}
        self.generator: torch.Generator | None = None

    @checkpointable
    def forward(self, x: torch.Tensor, begun: bool) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        if not begun:
            return self.out(h * torch.ones(()))
        if self.where == "attribute":
            self.generator = self.generator or torch.Generator().manual_seed(1)
            generator = self.generator
        else:
            generator = self.own.setdefault("generator", torch.Generator().manual_seed(1))
        return self.out(h * torch.rand((), generator=generator))


@pytest.mark.parametrize("where", ["attribute", "dict"])
def test_generator_that_a_layer_makes_for_itself_at_any_call(where: str, exact_from: Any) -> None:
    def build() -> Stack:
        return Stack([MakesGenerator(where) for _ in range(3)])

    exact_from(build)
