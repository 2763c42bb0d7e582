"""Parts that read, or change, what the layer is given beside its input."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.fuzz.catalogue import LayerCall, Part


class Mask(Part):
    """A tensor that all layers share."""

    wants = ("mask",)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return h * call["mask"] if self.k % 2 else h.masked_fill(call["mask"] > 0.7, 0.1)


class Gate(Part):
    """A tensor that all layers share, and that gets a gradient; sometimes it is another layer's output."""

    wants = ("gate",)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        gate = call["gate"]
        return h * gate.sigmoid() if self.k % 2 else torch.addcmul(h, gate, h, value=0.5)


class Info(Part):
    """Things that are no tensors: strings, slices, functions, None, nested tensors."""

    wants = ("info",)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        info: dict[str, Any] = call["info"]
        h = info["activation"](h) if self.k % 2 else h * info["scale"]
        head = torch.zeros_like(h)
        head[info["rows"]] = h[info["rows"]]
        return h + head * info["nested"][0]["weight"]


class Cache:
    """A key-value cache as large libraries have: an object with lists of tensors, updated by index."""

    def __init__(self) -> None:
        self.keys: list[Tensor | None] = []
        self.n_seen = 0

    def update(self, index: int, value: Tensor) -> Tensor:
        while len(self.keys) <= index:
            self.keys.append(None)
        old = self.keys[index]
        self.keys[index] = new = value if old is None else torch.cat([old, value])
        self.n_seen += 1
        return new


class CacheObject(Part):
    """k: without a graph, with one."""

    wants = ("cache",)
    may_begin_late = False  # limits.md: an object is watched from the first checked call that changes it

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        cache: Cache = call["cache"]["object"]
        return h + cache.update(call.layer.index, h if self.k % 2 else h.detach()).mean(0)


class CacheList(Part):
    wants = ("cache",)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        seen: list[Tensor] = call["cache"]["list"]
        seen.append(h if self.k % 2 else h.detach())
        return h + torch.stack([t.to(h.dtype) for t in seen]).mean(0)


class CacheDict(Part):
    """An entry for each layer, overwritten by each call."""

    wants = ("cache",)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        memory: dict[int, Tensor] = call["cache"]["dict"]
        old = memory.get(call.layer.index)
        memory[call.layer.index] = h if self.k % 2 else h.detach()
        return h if old is None else h + old * 0.5


class CacheSlot(Part):
    """A tensor made beforehand, written in place at a position."""

    wants = ("cache",)
    refuses = ("InputModifiedError",)  # where another layer was given it, too

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        buffer: Tensor = call["cache"]["static"]
        with torch.no_grad():
            if self.k % 2:
                buffer[call.layer.index % buffer.shape[0]] = h.detach().float().mean(0)
            else:
                buffer.index_copy_(0, torch.tensor([self.k]), h.detach().float()[:1])
        return h + buffer.sum(0).to(h.dtype).tanh()


class GradOfGiven(Part):
    """Asks for the gradient of what it computes by something it was given (forces from an energy)."""

    wants = ("gate",)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        gate = call["gate"].detach().requires_grad_()
        (force,) = torch.autograd.grad((h * gate.sigmoid()).sum(), gate, create_graph=True)
        return h + force * 0.5


class InPlaceOnInput(Part):
    """Works in place on the layer's own input, as `nn.ReLU(inplace=True)` at its start does."""

    excludes = ("offload",)  # as for `x += layer(x)`

    refuses = ("InputModifiedError",)  # where something else reads that input, too

    def at_entry(self, x: Tensor, call: LayerCall) -> Tensor:
        if x.is_leaf and x.requires_grad:
            return x.tanh()
        if self.k == 0:
            return x.tanh_()
        if self.k == 1:
            return x.mul_(0.9)
        if self.k == 2:
            x[0] = 0.5
            return x
        x[:, :2].add_(0.1)
        return x


class ReadsFlags(Part):
    """Asks about grad mode and `requires_grad`, and goes another way."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if torch.is_grad_enabled() and call.x.requires_grad:
            h = h.sigmoid() * h
        if call.x.is_leaf and self.k % 2:
            h = h * 0.7
        return h if self.training else h * 0.5
