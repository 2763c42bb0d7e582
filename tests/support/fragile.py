"""Small models whose code, hooks, context managers and backward functions may each fail: one case for each habit."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ckptdeco import checkpoint, checkpointable
from tests.support.faults import point
from tests.support.layers import DIM, Stack, Stem


@contextlib.contextmanager
def fragile_context() -> Iterator[None]:
    """A context manager that may fail on its way in and out."""
    point("entering")
    try:
        yield
        point("in the context manager")
    finally:
        point("leaving")


class _Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        point("function forward")
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        point("function backward")
        (x,) = ctx.saved_tensors
        (again,) = ctx.saved_tensors
        point("function backward, after unpacking")
        return grad * x.cos() + 0 * again


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    @checkpointable
    def forward(self, x: torch.Tensor, *rest: Any) -> torch.Tensor:
        point("begin")
        h = self.work(self.linear(x), *rest)
        point("end")
        return h

    def work(self, h: torch.Tensor, *rest: Any) -> torch.Tensor:
        return torch.tanh(h)


class Drops(Plain):
    def work(self, h: torch.Tensor) -> torch.Tensor:
        h = torch.dropout(h, 0.3, train=True)
        point("after the draw")
        return torch.tanh(h)


class Norms(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def work(self, h: torch.Tensor) -> torch.Tensor:
        h = self.norm(h)
        point("after the norm")
        return torch.tanh(h)


class Counts(Plain):
    """Stores numbers, a list and a tensor without a graph on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.seen, self.last = 0, [], torch.zeros(DIM)

    def work(self, h: torch.Tensor) -> torch.Tensor:
        self.n += 1
        point("after counting")
        self.seen.append(self.n)
        self.last = h.detach().mean(0)
        point("after storing")
        return torch.tanh(h) / self.n


class Stores(Plain):
    """Stores a tensor of its graph on itself and on a submodule."""

    def __init__(self) -> None:
        super().__init__()
        self.last: Any = None
        self.linear.energy = 0.0

    def work(self, h: torch.Tensor) -> torch.Tensor:
        self.last = h.square().mean()
        point("after storing")
        self.linear.energy = self.last
        return torch.tanh(h)


class Mutates(Plain):
    """Works in place on its input."""

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.tanh_()
        point("after the write")
        return self.linear(x) + x


class Cache:
    """Keys of earlier calls, as generation keeps them."""

    def __init__(self) -> None:
        self.keys: list[torch.Tensor] = []
        self.length = 0


class Caches(Plain):
    def work(self, h: torch.Tensor, cache: Cache) -> torch.Tensor:
        cache.keys.append(h.detach())
        point("after appending")
        cache.length += 1
        return torch.tanh(h + sum(cache.keys) / cache.length)


class LargeBuffer(Plain):
    """Writes a buffer that is too large to be cloned unless it is known to be written, and replaces a small one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.zeros(150, 150))
        self.register_buffer("mean", torch.zeros(DIM))

    def work(self, h: torch.Tensor) -> torch.Tensor:
        self.table.add_(0.5)
        point("after the write")
        self.mean = 0.9 * self.mean + h.detach().mean(0)
        point("after the replacement")
        return torch.tanh(h + self.mean + self.table[0, 0])


class Forces(Plain):
    """Runs a backward of its own within forward."""

    def work(self, h: torch.Tensor) -> torch.Tensor:
        energy = torch.tanh(h).square().sum()
        point("before the inner backward")
        (force,) = torch.autograd.grad(energy, h, create_graph=True)
        point("after the inner backward")
        return torch.tanh(h) + 0.1 * force


class HostDraws(Plain):
    """Draws from Python's and NumPy's generators and from one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(5)

    def work(self, h: torch.Tensor) -> torch.Tensor:
        scale = 1 + random.random()
        point("after a draw of Python's")
        scale += float(numpy.random.rand())
        return torch.tanh(h * scale + torch.rand(DIM, generator=self.generator))


class Managed(Plain):
    """Context managers, a custom Function and tensor hooks."""

    def work(self, h: torch.Tensor) -> torch.Tensor:
        with fragile_context():
            h = _Double.apply(h)
        h.register_hook(lambda grad: point("gradient hook"))
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
            bias = (h @ h.t()).float().mean()
            point("in autocast")
        return torch.tanh(h) + bias


class Hooked(Plain):
    """Hooks of all kinds on a module inside the layer, and on the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear.register_forward_pre_hook(lambda *_: point("inner pre-hook"))
        self.linear.register_forward_hook(lambda *_: point("inner hook"))
        self.register_forward_pre_hook(lambda *_: point("outer pre-hook"))
        self.register_forward_hook(lambda *_: point("outer hook"))
        self.linear.register_full_backward_hook(lambda *_: point("inner backward hook"))
        self.linear.weight.register_hook(lambda grad: point("parameter hook"))


class Outer(nn.Module):
    """A decorated layer with decorated layers inside."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Drops(), Plain()

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(self.one(x))


class DropIn(Plain):
    """Uses `checkpoint` within a decorated layer, with context managers of its own."""

    def work(self, h: torch.Tensor) -> torch.Tensor:
        made = lambda: (fragile_context(), fragile_context())  # noqa: E731
        out: torch.Tensor = checkpoint(lambda h: torch.dropout(torch.tanh(h), 0.2, train=True), h, context_fn=made)
        return out + h


Step = Callable[[nn.Module, torch.Tensor, Any, list[Any]], torch.Tensor]


def usual_step(model: nn.Module, x: torch.Tensor, context: Any, others: list[Any]) -> torch.Tensor:
    """Forward in the context, backward after it."""
    with context:
        out: torch.Tensor = model(x, *others)
    out.square().sum().backward()
    return out


def step_within(model: nn.Module, x: torch.Tensor, context: Any, others: list[Any]) -> torch.Tensor:
    """Forward and backward in the context."""
    with context:
        out: torch.Tensor = model(x, *others)
        out.square().sum().backward()
    return out


def step_with_changes(model: nn.Module, x: torch.Tensor, context: Any, others: list[Any]) -> torch.Tensor:
    """Between forward and backward every kind of module state is changed that a recompute puts back."""
    with context:
        out: torch.Tensor = model(x, *others)
    layers = list(model.body.layers)
    point("before the changes")
    for layer in layers:
        layer.eval()
        layer.linear.bias.requires_grad_(False)
        layer.linear.mark = "changed"
        vars(layer).setdefault("added", 1.0)
    out.square().sum().backward()
    return out


def step_in_other_surroundings(model: nn.Module, x: torch.Tensor, context: Any, others: list[Any]) -> torch.Tensor:
    """Forward in autocast, with another default dtype and device, in deterministic mode; backward in none of these."""
    torch.set_default_dtype(torch.float64)
    torch.use_deterministic_algorithms(True)
    try:
        with context, torch.autocast("cpu", dtype=torch.bfloat16), torch.device("cpu"):
            out: torch.Tensor = model(x, *others)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
    out.float().square().sum().backward()
    return out


def step_with_saved_tensor_hooks(model: nn.Module, x: torch.Tensor, context: Any, others: list[Any]) -> torch.Tensor:
    """The user's own saved-tensor hooks are around the forward."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        point("pack hook", is_progress=False)  # also called for what is kept
        return tensor.detach()

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        point("unpack hook", is_progress=False)
        return tensor

    with saved_tensors_hooks(pack, unpack), context:
        out: torch.Tensor = model(x, *others)
    out.square().sum().backward()
    return out


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and its step.

    Attributes:
        layer: makes one layer.
        step: the training step.
        others: makes the further arguments of a step.
        stores_graph: its layers store a tensor with a graph on themselves, so what it leads to stays alive.
    """

    name: str
    layer: Callable[[], nn.Module]
    step: Step = usual_step
    others: Callable[[], list[Any]] = list
    stores_graph: bool = False

    def build(self, n_layers: int = 3) -> nn.Module:
        """The model."""
        return Stem(Stack([self.layer() for _ in range(n_layers)]))

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("plain", Plain),
    Case("plain_within", Plain, step_within),
    Case("draws", Drops),
    Case("batchnorm", Norms),
    Case("counts", Counts),
    Case("stores_graph", Stores, stores_graph=True),
    Case("mutates_input", Mutates),
    Case("cache", Caches, others=lambda: [Cache()]),
    Case("large_buffer", LargeBuffer),
    Case("inner_backward", Forces),
    Case("host_draws", HostDraws),
    Case("managed", Managed),
    Case("hooked", Hooked),
    Case("nested", Outer),
    Case("drop_in", DropIn),
    Case("changed_state", Counts, step_with_changes),
    Case("changed_norms", Norms, step_with_changes),
    Case("surroundings", Drops, step_in_other_surroundings),
    Case("saved_tensor_hooks", Drops, step_with_saved_tensor_hooks),
)
