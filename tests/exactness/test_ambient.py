"""What surrounds forward only, or backward only, is in the recompute what it was in forward."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tests.support.layers import DIM, Layer, Stack, Stem, batch
from tests.support.oracle import total
from tests.support.subject import checkpointable

_scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


class Scaled(Layer):
    """Reads a context variable, makes a tensor of the default dtype, and attends."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.one(x)) * _scale.get() * torch.ones(())
        h = h.to(self.two.weight.dtype)
        q = h[None, None]
        return self.two(functional.scaled_dot_product_attention(q, q, q)[0, 0] + h)


class TanhTimes(TorchFunctionMode):
    def __torch_function__(self, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = f(*args, **(kwargs or {}))
        return out * 1.5 if f is torch.tanh else out


@contextlib.contextmanager
def _scaled() -> Iterator[None]:
    token = _scale.set(2.0)
    try:
        yield
    finally:
        _scale.reset(token)


@contextlib.contextmanager
def _double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


SURROUNDINGS = {
    "context variable": _scaled,
    "function mode": TanhTimes,
    "default dtype": _double_by_default,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "sdpa math": lambda: sdpa_kernel(SDPBackend.MATH),
}
every_surrounding = pytest.mark.parametrize("surrounding", SURROUNDINGS.values(), ids=SURROUNDINGS)


@every_surrounding
def test_surroundings_of_forward_hold_in_the_recompute(surrounding: Any, exact_from: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        x, begun = inputs
        with surrounding() if begun else contextlib.nullcontext(), context():
            out = model(x)
        total(out).backward()
        return out

    exact_from(lambda: Stem(Stack([Scaled() for _ in range(4)])), step)


@every_surrounding
def test_surroundings_of_backward_do_not_reach_the_recompute(surrounding: Any, exact_from: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        x, begun = inputs
        with context():
            out = model(x)
        loss = total(out)
        with surrounding() if begun else contextlib.nullcontext():
            loss.backward()
        return out

    exact_from(lambda: Stem(Stack([Scaled() for _ in range(4)])), step)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_gradients_asked_for_where_grad_mode_is_off(mode: Any, exact_from: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        x, begun = inputs
        with context():
            out = model(x)
        loss = total(out)
        with mode() if begun else contextlib.nullcontext():
            got = torch.autograd.grad(loss, [x, *model.parameters()])
        return out, [g.clone() for g in got]

    exact_from(lambda: Stem(Stack([Scaled() for _ in range(4)])), step)


class ReadsTable(Layer):
    """Reads a buffer that may have been made in inference mode, and so has no version."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.register_buffer("table", torch.rand(DIM))

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + self.table.clone()


def test_buffers_made_in_inference_mode(exact_from: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        x, begun = inputs
        if begun:
            with torch.inference_mode():
                for layer in model.body.layers:
                    layer.table = layer.table * 0.5
        with context():
            out = model(x)
        total(out).backward()
        return out

    exact_from(lambda: Stem(Stack([ReadsTable() for _ in range(4)])), step)


class Mine(torch.Tensor):
    """A subclass whose tanh is another."""

    @classmethod
    def __torch_function__(cls, f: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_function__(f, types, args, kwargs or {})
        return out * 3 if f is torch.tanh else out


class TwoLinears(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(torch.tanh(self.one(x)))


@pytest.mark.parametrize("is_stem", [True, False], ids=["made_in_the_step", "made_of_a_leaf"])
def test_tensor_subclass_is_one_in_the_recompute(is_stem: bool, exact_from: Any) -> None:
    def step(model: Stem, inputs: Any, context: Any) -> Any:
        x, begun = inputs
        with context():
            h = model.stem(x) if is_stem else x
            out = model.body(h.as_subclass(Mine) if begun else h).as_subclass(torch.Tensor)
        total(out).backward()
        return out

    exact_from(lambda: Stem(Stack([TwoLinears() for _ in range(4)])), step)


def test_nothing_of_the_surroundings_is_left_after_backward(under: Any) -> None:
    model = Stem(Stack([Scaled() for _ in range(4)]))
    for _ in range(7):
        with _scaled(), _double_by_default(), under():
            out = model(batch().float())
        total(out).backward()
        assert _scale.get() == 1.0
        assert torch.get_default_dtype() == torch.float32
        assert not torch.is_autocast_enabled("cpu")
