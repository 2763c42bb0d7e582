"""Small layers, each with one habit that checkpointing might get wrong, and the ordinary loops around them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tests.support import meters
from tests.support.subject import checkpointable

DIM = 8


class Layer(nn.Module):
    """Base: gives each layer a label, under which meters count its forwards."""

    def __init__(self, label: str = "layer") -> None:
        super().__init__()
        self.label = label


class Block(Layer):
    """Residual MLP block: saves its input (LayerNorm), not its output."""

    def __init__(self, dim: int = DIM, p: float = 0.0, label: str = "block") -> None:
        super().__init__(label)
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.drop = nn.Dropout(p)
        self.down = nn.Linear(2 * dim, dim)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        meters.tick(self.label)
        return x + self.down(self.drop(functional.gelu(self.up(self.norm(x)))))


class TanhLayer(Layer):
    """tanh(linear): saves its input and its output."""

    def __init__(self, dim: int = DIM, label: str = "tanh") -> None:
        super().__init__(label)
        self.linear = nn.Linear(dim, dim)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        meters.tick(self.label)
        return torch.tanh(self.linear(x))


class MaskedLayer(Layer):
    """Keyword and plain arguments beside the hidden state."""

    def __init__(self, dim: int = DIM, label: str = "masked") -> None:
        super().__init__(label)
        self.linear = nn.Linear(dim, dim)

    @checkpointable
    def forward(
        self,
        x: torch.Tensor,
        mask: torch.Tensor | None = None,
        *,
        scale: float = 1.0,
        mode: str = "tanh",
        flip: bool = False,
    ) -> torch.Tensor:
        meters.tick(self.label)
        h = self.linear(x)
        h = torch.tanh(h) if mode == "tanh" else functional.silu(h)
        if mask is not None:
            h = h * mask * h.sigmoid()
        if flip:
            h = h.flip(-1)
        return x + scale * h


class BatchNormLayer(Layer):
    """Changes buffers in every training forward."""

    def __init__(self, dim: int = DIM, label: str = "batchnorm") -> None:
        super().__init__(label)
        self.linear = nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        meters.tick(self.label)
        return x + functional.silu(self.norm(self.linear(x)))


class InPlaceInsideLayer(Layer):
    """Works in place on tensors of its own, one of them saved before by an operation that does not mind."""

    def __init__(self, dim: int = DIM, label: str = "inplace") -> None:
        super().__init__(label)
        self.linear = nn.Linear(dim, dim)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        meters.tick(self.label)
        h = self.linear(x)
        h.mul_(0.5).relu_()
        out = h * x
        out += x
        return out


class InPlaceOnInputLayer(Layer):
    """Works in place on its own input, as `nn.ReLU(inplace=True)` at the start of a layer does."""

    def __init__(self, dim: int = DIM, label: str = "inplace_input") -> None:
        super().__init__(label)
        self.linear = nn.Linear(dim, dim)

    @checkpointable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        meters.tick(self.label)
        x.tanh_()
        return self.linear(x) + x


class PairLayer(Layer):
    """Two tensors in, a tuple of two out."""

    def __init__(self, dim: int = DIM, label: str = "pair") -> None:
        super().__init__(label)
        self.one, self.two = nn.Linear(dim, dim), nn.Linear(dim, dim)

    @checkpointable
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        meters.tick(self.label)
        return torch.tanh(self.one(y)) + x, functional.silu(self.two(x)) * y


class DictLayer(Layer):
    """A dict in, a new dict out."""

    def __init__(self, dim: int = DIM, label: str = "dict") -> None:
        super().__init__(label)
        self.linear = nn.Linear(dim, dim)

    @checkpointable
    def forward(self, state: dict[str, Any]) -> dict[str, Any]:
        meters.tick(self.label)
        h = torch.tanh(self.linear(state["h"]))
        return {"h": h * state["gate"], "gate": state["gate"], "seen": [*state["seen"], h.mean()], "n": state["n"] + 1}


class State(collections.OrderedDict):  # type: ignore[type-arg]
    """An OrderedDict with attribute access, as model outputs of large libraries are."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


Pair = collections.namedtuple("Pair", ["h", "extra"])


@dataclasses.dataclass
class Hidden:
    """A dataclass with tensors, a namedtuple and a dict inside."""

    h: torch.Tensor
    pair: Pair
    info: dict[str, Any]
    n_created: int = dataclasses.field(default=0)


class CrossLayer(Layer):
    """Attends to a context made elsewhere, such as an encoder's output."""

    def __init__(self, dim: int = DIM, label: str = "cross") -> None:
        super().__init__(label)
        self.query, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim)

    @checkpointable
    def forward(self, x: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        meters.tick(self.label)
        weights = torch.softmax(self.query(x) @ context.transpose(-1, -2), -1)
        return x + weights @ self.value(context)


class Stack(nn.Module):
    """The ordinary loop; keyword and further arguments go to every layer."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


class Stem(nn.Module):
    """A linear layer in front of a model, so that the first layer's input is no leaf and needs a gradient."""

    def __init__(self, body: nn.Module, dim: int = DIM) -> None:
        super().__init__()
        self.stem, self.body = nn.Linear(dim, dim), body

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self.body(self.stem(x), *args, **kwargs)


class Loop(nn.Module):
    """Layers and a function that is the model's loop: `loop(model, *inputs)`."""

    def __init__(self, layers: Sequence[nn.Module], loop: Callable[..., Any], **modules: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.loop = loop
        for name, module in modules.items():
            self.add_module(name, module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.loop(self, *args, **kwargs)


def stack(n_layers: int = 7, make: Callable[..., nn.Module] = Block, dim: int = DIM, **options: Any) -> Stack:
    """Returns a stack of n layers labelled "0", "1", …"""
    return Stack([make(dim, label=str(i), **options) for i in range(n_layers)])


def batch(rows: int = 4, dim: int = DIM, *, requires_grad: bool = True) -> torch.Tensor:
    """Returns a random batch."""
    return torch.randn(rows, dim).requires_grad_(requires_grad)


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, label: str) -> torch.Tensor:
        ctx.label = label
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        meters.mark(ctx.label)
        return grad, None


class Marked(Layer):
    """Sums its inputs through tanh(linear); its backward begins with a note in `meters.log_calls`.

    The mark saves nothing and comes last, so that between two marks lies the walk of one call.
    """

    def __init__(self, dim: int = DIM, label: str = "marked") -> None:
        super().__init__(label)
        self.linear = nn.Linear(dim, dim)

    @checkpointable
    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        meters.tick(self.label)
        x = inputs[0]
        for other in inputs[1:]:
            x = x + other
        h: torch.Tensor = _Mark.apply(torch.tanh(self.linear(x)) + x, self.label)
        return h
