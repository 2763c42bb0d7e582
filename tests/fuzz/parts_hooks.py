"""Parts with hooks on modules inside the layer, and decorated layers inside the layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.catalogue import WIDTH, LayerCall, Part
from tests.support.subject import checkpointable


class _Inner(nn.Module):
    """A decorated layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    @checkpointable
    def forward(self, h: Tensor, scale: float = 1.0) -> Tensor:
        return h + self.drop(torch.tanh(self.linear(h))) * scale


class Decorated(Part):
    """One or several decorated layers inside."""

    is_random = True

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.layers = nn.ModuleList(_Inner() for _ in range(1 + k % 3))

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        for layer in self.layers:
            h = layer(h, scale=0.5)
        return h


class InnerHook(Part):
    """A hook on a module inside, there from the beginning."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.map = nn.Linear(WIDTH, WIDTH)
        if k == 0:
            self.map.register_forward_hook(lambda module, args, out: out * 2)
        elif k == 1:
            self.map.register_forward_pre_hook(lambda module, args: (args[0].sin(),))
        elif k == 2:
            self.map.register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,))
        else:
            self.map.register_full_backward_pre_hook(lambda module, out: (out[0] * 0.5,))

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return self.map(h)


class HookForOneCall(Part):
    """A hook that is registered and removed within the call."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        caught: list[Any] = []
        handle = self.map.register_forward_hook(lambda module, args, out: caught.append(out))
        try:
            out = self.map(h)
        finally:
            handle.remove()
        return out + caught[0].sigmoid()


class HookOnWeight(Part):
    """A hook on a weight, registered in the first call."""

    may_begin_late = False

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.map = nn.Linear(WIDTH, WIDTH)
        self.handle: Any = None

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.handle is None and torch.is_grad_enabled():
            self.handle = self.map.weight.register_hook(lambda grad: grad * 0.5)
        return self.map(h)


class LazyWeight(Part):
    """A parameter made in the first call."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.map = nn.LazyLinear(WIDTH)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return self.map(h)
