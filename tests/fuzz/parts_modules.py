"""Parts made of torch's modules: norms with statistics, reparametrised weights, recurrent and attention layers."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize

from tests.fuzz.catalogue import WIDTH, LayerCall, Part, small


class BatchNorm(Part):
    """k: momentum given, None, frozen in eval mode, without statistics."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None if k == 1 else 0.1, track_running_stats=k != 3)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 2:
            self.norm.eval()
        return self.norm(h)


class FunctionalBatchNorm(Part):
    """Statistics that are buffers, or plain tensors."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        mean, var = torch.zeros(WIDTH), torch.ones(WIDTH)
        if k % 2:
            self.mean, self.var = mean, var
        else:
            self.register_buffer("mean", mean)
            self.register_buffer("var", var)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return functional.batch_norm(h, self.mean, self.var, training=self.training, momentum=0.3)


class InstanceNorm(Part):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.norm = nn.InstanceNorm1d(WIDTH, track_running_stats=k % 2 == 0, affine=True)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return self.norm(h.t()[None])[0].t()


class OtherNorms(Part):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        kinds: list[Any] = [nn.LayerNorm(WIDTH), nn.GroupNorm(2, WIDTH), nn.RMSNorm(WIDTH), nn.LayerNorm(WIDTH)]
        self.norm = kinds[k]

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return self.norm(h)


class SpectralNorm(Part):
    """As a hook, or as a parametrization."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        make: Any = nn.utils.spectral_norm if k % 2 else parametrizations.spectral_norm
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.map = make(nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return self.map(h).relu()


class WeightNorm(Part):
    """As a hook, or as a parametrization, cached or not."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        make: Any = nn.utils.weight_norm if k == 0 else parametrizations.weight_norm
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.map = make(nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k < 2:
            return self.map(h)
        with parametrize.cached():
            return self.map(self.map(h).relu())


class _Symmetric(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.triu() + w.triu(1).t()


class Parametrized(Part):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.map = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.map, "weight", _Symmetric())

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return self.map(h)


class Recurrent(Part):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.rnn = [nn.LSTM, nn.GRU, nn.RNN, nn.LSTM][k](WIDTH, WIDTH, dropout=0.0)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return self.rnn(h)[0]


class Attention(Part):
    is_random = True

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.map = nn.MultiheadAttention(WIDTH, 2, dropout=small(k) if k else 0.0)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return self.map(h, h, h, need_weights=self.k % 2 == 0)[0]


class EncoderLayer(Part):
    """It has a fast path in eval mode without grad."""

    is_random = True

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.map = nn.TransformerEncoderLayer(WIDTH, 2, 6, dropout=0.2 if k % 2 else 0.0, norm_first=k > 1)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return self.map(h)


class Adapter(Part):
    """LoRA-like: may be switched off, merged into nothing, or be the only part that trains."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(k % 2 == 0)
        self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.3), nn.Parameter(torch.randn(2, WIDTH) * 0.3)
        self.enabled = k != 3

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        out = self.base(h)
        return out + functional.dropout(h, 0.0) @ self.a @ self.b if self.enabled else out


class FunctionalCall(Part):
    """Runs its module with other weights: scaled ones, or ones of its own making."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.map = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        weights = {name: value * (0.5 + self.k) for name, value in self.map.named_parameters()}
        return torch.func.functional_call(self.map, weights, (h,))


class Experts(Part):
    """Rows go to one of two maps; which tensors are saved depends on the data."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.router = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        scores = self.router(h).softmax(-1)
        choice, out = scores.argmax(-1), torch.zeros_like(h)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, (expert(h[rows]) * scores[rows, i, None]).to(out.dtype))
        return out


class Embedding(Part):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.table = nn.Embedding(8, WIDTH, max_norm=None)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return h + self.table(h.detach().argmax(-1) + self.k)
