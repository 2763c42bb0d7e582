"""Parts that keep something on themselves, on their layer, or in buffers, from call to call."""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.catalogue import ROWS, WIDTH, LayerCall, Part


class Counter(Part):
    """A number: on itself, on its layer, or made when first needed."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.n = 0

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k % 2:
            call.layer.n_calls = n = getattr(call.layer, "n_calls", 0) + 1
        else:
            self.n += 1
            n = self.n
        return h / (1 + n)


class CounterBuffer(Part):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 0:
            self.n += 1
        elif self.k == 1:
            self.n = self.n + 1
        elif self.k == 2:
            self.n.data.add_(1)
        else:
            self.n.copy_(self.n + 2)
        return h / self.n.to(h.dtype)


class Observer(Part):
    """A running range, as quantisation keeps it."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.register_buffer("low", torch.zeros(()))
        self.register_buffer("high", torch.zeros(WIDTH))

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        with torch.no_grad():
            low, high = h.detach().float().amin(), h.detach().float().amax(0)
            if self.k % 2:
                self.low.copy_(torch.minimum(self.low, low))
                self.high.lerp_(high, 0.1)
            else:
                self.low, self.high = torch.minimum(self.low, low), self.high * 0.9 + high * 0.1
        return h.clamp(self.low.item() - 0.1) * (1 + self.high.abs()).to(h.dtype)


class LazyCache(Part):
    """A table made when first needed, or when a longer one is."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k % 2:
            if not hasattr(call.layer, "table"):
                call.layer.table = torch.linspace(0, 1, ROWS)[:, None].cos()
            return h * call.layer.table
        if not hasattr(self, "table") or self.n_rows < h.shape[0]:
            self.n_rows = h.shape[0]
            self.register_buffer("table", torch.linspace(0, 1, ROWS)[:, None].sin(), persistent=False)
        return h + self.table


class Spiking(Part):
    """A membrane that leaks and is reset; no graph from call to call."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.membrane: Any = None

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        old = torch.zeros_like(h) if self.membrane is None else self.membrane
        now = old * 0.5 + h
        if self.k % 2:
            with torch.no_grad():
                self.membrane = now * (now < 1)
        else:
            self.membrane = (now * (now < 1)).detach()
        return now.sigmoid()


class RecurrentWithGraph(Part):
    """The state of the call before, with its graph, within one step."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.state: Any = None

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        new = h if self.state is None else torch.tanh(h + self.state)
        self.state = new
        return new * 0.9

    def reset(self) -> None:
        self.state = None


class StateList(Part):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.seen: Any = [[], collections.deque(maxlen=3), collections.deque(), []][k]

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        self.seen.append(len(self.seen) if self.k < 3 else h.detach())
        return h / (1 + len(self.seen))


class StateDict(Part):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.seen: Any = [{}, collections.defaultdict(list), collections.OrderedDict(), set()][k]

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 0:
            self.seen["n"] = self.seen.get("n", 0) + 1
        elif self.k == 1:
            self.seen[call.step % 2].append(h.detach().sum())
        elif self.k == 2:
            self.seen.setdefault("tensor", torch.zeros(1)).add_(1)
        else:
            self.seen.add(len(self.seen))
        return h / (1 + len(self.seen))


class StateTensor(Part):
    """A plain tensor, written in place, replaced, or both."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.tensor = torch.zeros(WIDTH)
        self.tensors = [torch.zeros(WIDTH)]

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 0:
            self.tensor.add_(1)
        elif self.k == 1:
            self.tensor = self.tensor * 0.5 + h.detach().float().mean(0)
        elif self.k == 2:
            self.tensors[0].lerp_(h.detach().float()[0], 0.3)
        else:
            self.tensors[0] = self.tensors[0] + 1
        return h / (1 + self.tensor.abs() + self.tensors[0].abs())


class Meter:
    """An object with state, as a logger or a cache is."""

    def __init__(self) -> None:
        self.n, self.values = 0, [0.0]

    def update(self, value: float) -> int:
        self.n += 1
        self.values.append(value)
        return self.n


class StateObject(Part):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.meter = Meter()

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return h / self.meter.update(h.detach().sum().item())


class AuxLoss(Part):
    """A loss left on the module for the training loop, which adds it; with or without a graph."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.aux_loss: Any = None

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        aux = h.square().mean()
        self.aux_loss = aux if self.k < 3 else aux.detach()
        return h * 0.9

    def reset(self) -> None:
        self.aux_loss = None


class LastOutput(Part):
    """Keeps what it saw, for the caller to look at: the tensor itself, a copy, or a list of all."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.last: Any = None
        self.all: list[Any] = []

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 0:
            self.last = h
        elif self.k == 1:
            self.last = h.detach()
        else:
            self.all.append(h if self.k == 2 else h.detach().clone())
        return h.sigmoid() * h

    def reset(self) -> None:
        self.last, self.all = None, []


class BorrowsAttribute(Part):
    """Sets an attribute of another module for a while, with `finally` or without."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.inner = nn.Softplus()

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        before, self.inner.beta = self.inner.beta, 2.0 + self.k
        if self.k % 2:
            try:
                return self.inner(h)
            finally:
                self.inner.beta = before
        h = self.inner(h)
        self.inner.beta = before
        return h
