"""Dropout, in-place operations inside a layer and on its input, BatchNorm, Python and NumPy randomness."""

from __future__ import annotations

import random
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional

from tests.support.layers import (
    DIM,
    BatchNormLayer,
    Block,
    InPlaceInsideLayer,
    InPlaceOnInputLayer,
    Layer,
    Loop,
    Stack,
    Stem,
    batch,
    stack,
)
from tests.support.oracle import assert_same, forward_backward, step_inside
from tests.support.subject import checkpointable


def test_dropout(under: Any) -> None:
    assert_same(lambda: stack(7, p=0.5), forward_backward, lambda: (batch(),), under)
    assert_same(lambda: stack(7, p=0.5), step_inside, lambda: (batch(),), under)


def test_dropout_in_some_layers_and_between_layers(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = functional.dropout(layer(x), 0.2)
        return x

    build = lambda: Loop([Block(p=0.5 * (i % 2)) for i in range(6)], loop)  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), under)


class LateDropout(Layer):
    """Draws only when told so, as warm-up schedules and stochastic branches do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, draws: bool) -> torch.Tensor:
        h = torch.tanh(self.linear(x))
        return functional.dropout(h, 0.4) if draws else h


def test_dropout_that_starts_at_a_later_step(under: Any) -> None:
    n_steps: list[int] = []

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        n_steps.append(1)
        step = (len(n_steps) - 1) // 2
        for i, layer in enumerate(m.layers):
            x = layer(x, draws=(step + i) % 3 == 2 or step > 2)
        return x

    assert_same(
        lambda: Loop([LateDropout() for _ in range(6)], loop), forward_backward, lambda: (batch(),), under, steps=5
    )


def test_batchnorm(under: Any) -> None:
    assert_same(lambda: stack(6, BatchNormLayer), forward_backward, lambda: (batch(),), under)


def test_batchnorm_with_evaluation_between(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
            out.sum().backward()
            model.eval()
            with torch.no_grad():
                evaluated = model(*inputs)
            model.train()
        return out, evaluated

    assert_same(lambda: stack(6, BatchNormLayer), program, lambda: (batch(),), under)


def test_batchnorm_forward_twice_then_backward(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            one, two = model(inputs[0]), model(inputs[1])
        (one.sum() + two.square().sum()).backward()
        return one, two

    assert_same(lambda: stack(5, BatchNormLayer), program, lambda: (batch(), batch()), under)


def test_in_place_inside_a_layer(under: Any) -> None:
    assert_same(lambda: stack(6, InPlaceInsideLayer), forward_backward, lambda: (batch(),), under)


def test_in_place_on_the_layers_own_input(under: Any) -> None:
    build = lambda: Stem(stack(6, InPlaceOnInputLayer))  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), under, steps=4)


def test_in_place_on_input_among_other_layers(under: Any) -> None:
    build = lambda: Stem(Stack([Block(p=0.2), InPlaceOnInputLayer(), Block(), InPlaceOnInputLayer(), Block(), Block()]))  # noqa: E731
    assert_same(build, forward_backward, lambda: (batch(),), under, steps=4)


class ActivationFirst(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.ReLU(inplace=True), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.act(x))


def test_in_place_activation_first(under: Any) -> None:
    assert_same(lambda: Stem(Stack([ActivationFirst() for _ in range(5)])), forward_backward, lambda: (batch(),), under)


class HostRandom(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = random.uniform(0.5, 1.5) * float(numpy.random.rand())
        h = torch.tanh(self.linear(x) * scale)
        return h.flip(0) if random.random() < 0.5 else h


def test_python_and_numpy_randomness(under: Any) -> None:
    assert_same(lambda: Stack([HostRandom() for _ in range(6)]), forward_backward, lambda: (batch(),), under, steps=4)


class OwnGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        noise = torch.rand(x.shape, generator=generator)
        return torch.tanh(self.linear(x)) * noise


def test_generator_given_as_an_argument(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> Any:
        generator = torch.Generator().manual_seed(3)
        for layer in m.layers:
            x = layer(x, generator)
        return x, torch.rand(2, generator=generator)

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out, drawn = model(*inputs)
        out.sum().backward()
        return out, drawn

    assert_same(lambda: Loop([OwnGenerator() for _ in range(5)], loop), program, lambda: (batch(),), under)


class GeneratorOnModule(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.seed = 5
        self.generator: torch.Generator | None = None

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.generator is not None
        return torch.tanh(self.linear(x)) * torch.rand(x.shape, generator=self.generator)


def test_generator_on_the_module(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> Any:
        for layer in m.layers:
            layer.generator = layer.generator or torch.Generator().manual_seed(3)
            x = layer(x)
        return x

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
        out.sum().backward()
        return out, [layer.generator.get_state() for layer in model.layers]

    assert_same(
        lambda: Loop([GeneratorOnModule() for _ in range(5)], loop), program, lambda: (batch(),), under, steps=4
    )


class SpectralLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(DIM, DIM))

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


def test_spectral_norm_inside_a_layer(under: Any) -> None:
    def build() -> Stack:
        return Stack([SpectralLayer() for _ in range(4)])

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            loss = model(inputs[0]).sum() - model(inputs[1]).square().sum()
        loss.backward()

    assert_same(build, program, lambda: (batch(), batch()), under)


class Recurrent(Layer):
    """Keeps a counter, a running tensor and an auxiliary loss on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("running", torch.zeros(DIM))
        self.n_calls = 0
        self.aux: torch.Tensor | None = None

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n_calls += 1
        h = torch.tanh(self.linear(x)) / self.n_calls
        self.running = self.running * 0.9 + h.detach().mean(0)
        self.aux = h.square().mean()
        return h + self.running


def test_counter_buffer_and_auxiliary_loss_on_the_module(under: Any) -> None:
    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out = model(*inputs)
            loss = out.sum() + sum(layer.aux for layer in model.layers)
        loss.backward()
        return out, [layer.n_calls for layer in model.layers], [layer.aux.detach() for layer in model.layers]

    assert_same(lambda: Stack([Recurrent() for _ in range(5)]), program, lambda: (batch(),), under, steps=4)


class AppendsToCache(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
        cache.append(self.linear(x))
        return x + torch.tanh(torch.stack(cache).sum(0))


def test_list_that_layers_append_to(under: Any) -> None:
    def loop(m: Loop, x: torch.Tensor) -> Any:
        cache: list[torch.Tensor] = []
        for layer in m.layers:
            x = layer(x, cache)
        assert len(cache) == len(m.layers)
        return x, cache

    def program(model: nn.Module, inputs: Any, context: Any) -> Any:
        with context():
            out, cache = model(*inputs)
        out.square().sum().backward()
        return out, len(cache)

    assert_same(lambda: Loop([AppendsToCache() for _ in range(4)], loop), program, lambda: (batch(),), under)
