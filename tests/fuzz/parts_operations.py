"""Parts that use tensors in ways that recognising and comparing them might get wrong; exceptions inside a layer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from tests.fuzz.catalogue import LayerCall, Part


class Smooth(Part):
    """Plain operations that save their input, their output, both or nothing."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return [h.sigmoid, h.sin, lambda: functional.gelu(h), lambda: h.exp() * 0.3][self.k]()


class InPlaceInside(Part):
    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        h = h * 0.7
        if self.k == 0:
            h.mul_(0.5).relu_()
        elif self.k == 1:
            h[:, 0] = h[:, 1] * 2
        elif self.k == 2:
            h += call.x.detach().to(h.dtype)
        else:
            out = torch.empty_like(h)
            out.copy_(h.sigmoid())
            h = out
        return h * 1.5


class Views(Part):
    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 0:
            return h.t().contiguous().t() * h
        if self.k == 1:
            one, two = h.chunk(2, -1)
            return torch.cat([two, one * two], -1)
        if self.k == 2:
            return h.unsqueeze(0).expand(3, *h.shape).sum(0) * h.flip(0)
        return h.as_strided(h.shape, h.stride()) * h.roll(1, -1)


class Complex(Part):
    """Conjugate and negative views are other values in the same memory."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        z = torch.complex(h.float(), h.float() * 0.5)
        if self.k == 0:
            return (z.conj() * z.exp()).real
        if self.k == 1:
            return z.conj().imag * h
        if self.k == 2:
            return torch.view_as_real(z.square()).sum(-1)
        return torch.fft.ifft(torch.fft.fft(z) * 1j).real


class Dtypes(Part):
    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        other = [torch.float64, torch.bfloat16, torch.float16, torch.float64][self.k]
        return h.to(other).sigmoid().to(h.dtype) * h


class AutocastInside(Part):
    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.k % 2 == 0):
            return functional.linear(h.float(), call.layer.linear.weight).float()


class Indexing(Part):
    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 0:
            return h.gather(-1, h.argsort(-1))
        if self.k == 1:
            return h.topk(h.shape[-1], -1).values.cumsum(-1)
        if self.k == 2:
            return torch.where(h > 0, h.exp() * 0.3, h)
        return functional.max_pool1d(h[None], 3, 1, 1)[0]


class Several(Part):
    """Further outputs beside the hidden state: views of it, parts of it, cut off ones."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        h = h.sigmoid() * h
        call.extra.append([h[:, :2], h.detach(), h.mean(), h.square()][self.k])
        return h


class Tries(Part):
    """Tries something that fails, and goes another way."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        try:
            g = h.sigmoid()
            return g @ torch.ones(3 + self.k + h.shape[-1], 2)
        except RuntimeError:
            return g * h
        finally:
            self.last_size = h.shape[0]


class Interrupted(RuntimeError):
    """Raised by a layer; the loop tries once more."""


class Raises(Part):
    """Raises in one step, before or after it did something; the loop tries again."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.has_raised = False

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        h = h.sigmoid() * h
        if call.step == self.k % 3 and not self.has_raised:
            self.has_raised = True
            raise Interrupted
        return h * 0.5


class Nothing(Part):
    """Returns what it was given, so that it saves nothing; or cuts it off."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return [h, h.detach(), h.view_as(h), h.clone()][self.k]
