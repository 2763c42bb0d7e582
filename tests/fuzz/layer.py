"""The layer that all programs are made of: a linear map and any parts, in any calling convention."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.catalogue import WIDTH, LayerCall, Part
from tests.fuzz.program import L
from tests.support.subject import checkpointable

Named = collections.namedtuple("Named", ["h", "more"])


@dataclasses.dataclass
class Hidden:
    """A dataclass that carries a hidden state."""

    h: Tensor
    info: dict[str, Any]


# How the input is given: what stands for x in the call. `FuzzLayer.forward` finds it again with `hidden_of`.
TAKES: dict[str, Callable[[Tensor], Any]] = {
    "plain": lambda x: x,
    "list": lambda x: [x],
    "dict": lambda x: {"h": x, "n": 1},
    "nested": lambda x: {"a": [1, (x, None)]},
    "dataclass": lambda x: Hidden(x, {"n": 1}),
    "namedtuple": lambda x: Named(x, None),
}

# How the output is given: made of the hidden state, the layer's input, and what parts give beside it.
GIVES: dict[str, Callable[[Tensor, Tensor, list[Tensor]], Any]] = {
    "plain": lambda h, x, extra: h,
    "tuple": lambda h, x, extra: (h, *extra),
    "list": lambda h, x, extra: [h, *extra],
    "dict": lambda h, x, extra: {"h": h, "mean": h.mean(), "extra": extra, "n": 3},
    "dataclass": lambda h, x, extra: Hidden(h, {"extra": extra}),
    "namedtuple": lambda h, x, extra: Named(h, extra),
    "view": lambda h, x, extra: h.view_as(h),
    "slice": lambda h, x, extra: (torch.cat([h, h], -1)[:, :WIDTH], extra),
    "with_input": lambda h, x, extra: (h, x),
    "with_detached": lambda h, x, extra: (h, h.detach(), None),
    "twice": lambda h, x, extra: (h, h),
    "transposed": lambda h, x, extra: h.t().contiguous().t(),
    "conj": lambda h, x, extra: torch.complex(h, h * 0.5).conj().real,
    "parts": lambda h, x, extra: torch.cat(h.chunk(2, -1), -1),
    "saved_by_producer": lambda h, x, extra: h.tanh(),
}


def hidden_of(value: Any) -> Tensor:
    """The first tensor in a value."""
    while not isinstance(value, Tensor):
        if isinstance(value, dict):
            value = value.get("h", value.get("a"))
        elif isinstance(value, Hidden):
            value = value.h
        else:
            value = next(item for item in value if isinstance(item, (Tensor, tuple, list, dict)))
    return value


def others_of(value: Any) -> list[Tensor]:
    """All further tensors in a value."""
    found: list[Tensor] = []
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, Tensor):
            found.append(item)
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, Hidden):
            stack += [item.h, item.info]
        elif isinstance(item, (list, tuple)):
            stack += item
    first = hidden_of(value)
    return [tensor for tensor in found if tensor is not first]


class FuzzLayer(nn.Module):
    """x -> x + tanh(linear(x)), with parts before and after the map.

    Attributes:
        step: set by the loop at the start of a step; parts that begin late look at it.
        index: its place in the model.
    """

    def __init__(self, spec: L, index: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH).requires_grad_(spec.trains)
        self.parts = nn.ModuleList(Part.catalogue[part.name](part.k) for part in spec.parts)
        self.since = tuple(part.since for part in spec.parts)
        self.gives = spec.gives
        self.takes = spec.takes
        self.index = index
        self.step = 0
        self.scale = 1.0
        self.wants = tuple(sorted({want for part in self.parts for want in part.wants}))

    @checkpointable
    def forward(self, x: Any, mask: Any = None, **arguments: Any) -> Any:
        x = hidden_of(x)
        call = LayerCall(self, x, self.step, {"mask": mask, **arguments})
        active = [part for part, since in zip(self.parts, self.since, strict=True) if self.step >= since]
        for part in active:
            x = part.at_entry(x, call)
        h = torch.tanh(self.linear(x.to(self.linear.weight.dtype)))
        for part in active:
            h = part(h, call)
        return GIVES[self.gives](x + h * self.scale, x, call.extra)
