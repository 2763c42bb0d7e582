"""Parts that draw random numbers, from every stream there is."""

from __future__ import annotations

import random

import numpy
import torch
from torch import Tensor
from torch.nn import functional

from tests.fuzz.catalogue import LayerCall, Part, small


class _Random(Part):
    is_random = True


class Dropout(_Random):
    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return functional.dropout(h, small(self.k), self.training)


class FeatureAndAlphaDropout(_Random):
    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        drop = [functional.alpha_dropout, functional.feature_alpha_dropout, functional.dropout1d][self.k % 3]
        return drop(h, 0.3, self.training)


class Rrelu(_Random):
    """Its noise is saved before it is filled."""

    excludes = ("copies_of_saved", "offload")  # which would copy what is not filled yet

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return functional.rrelu(h * 1, training=self.training)


class AttentionDropout(_Random):
    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        q = h.reshape(1, 2, -1, 2)
        out = functional.scaled_dot_product_attention(q, q * 0.5, q, dropout_p=small(self.k), is_causal=self.k == 2)
        return out.reshape(h.shape)


class Noise(_Random):
    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 0:
            return h + torch.randn_like(h)
        if self.k == 1:
            return h * torch.empty_like(h).bernoulli_(0.5)
        if self.k == 2:
            return h[torch.randperm(h.shape[0])]
        return h * torch.distributions.Normal(h.detach(), 1.0).sample()


class LayerDrop(_Random):
    """Whether it saves anything is drawn."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return h if torch.rand(()) < small(self.k) else h.sigmoid() * h


class _Other(_Random):
    is_lost_on_torch = True


class OwnGenerator(_Other):
    """A generator on the module."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.generator = torch.Generator().manual_seed(k)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return h * torch.rand(h.shape, generator=self.generator)


class OwnGenerators(_Other):
    """Generators in a container on the module; one of them is used."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.streams = {"a": [torch.Generator().manual_seed(1)], "b": [torch.Generator().manual_seed(2)]}

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return h + torch.rand(h.shape, generator=self.streams["ab"[self.k % 2]][0])


class GivenGenerator(_Other):
    """A generator among the arguments."""

    wants = ("generator",)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return h * torch.rand(h.shape, generator=call["generator"])


class GlobalGenerator(_Random):
    """Torch's own generator, by name."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return h + torch.normal(0.0, 1.0, h.shape, generator=torch.default_generator)


class PythonRandom(_Other):
    may_begin_late = False  # limits.md: watched from the first checked call that draws

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 0:
            return h * random.random()
        if self.k == 1:
            return h[:, random.sample(range(h.shape[1]), h.shape[1])]
        if self.k == 2:
            return h if random.random() < 0.5 else h.sigmoid() * h
        return h + random.gauss(0.0, 1.0)


class NumpyRandom(_Other):
    may_begin_late = False  # as above

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k < 2:
            return h * float(numpy.random.rand())
        return h + torch.from_numpy(numpy.random.standard_normal(tuple(h.shape))).to(h.dtype)


class Reseeds(_Random):
    """Sets the seed itself, for a noise that is the same each time."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k % 2:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.k)
                return h * torch.rand(h.shape)
        torch.manual_seed(self.k)
        return h * torch.rand(h.shape)


class DrawsTwice(_Random):
    """Before and after the map, from two streams."""

    def at_entry(self, x: Tensor, call: LayerCall) -> Tensor:
        return x * torch.rand(())

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return functional.dropout(h, 0.1, self.training) + torch.rand_like(h)
