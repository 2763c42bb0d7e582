"""Parts that deal with autograd itself: custom Functions, inner gradients, hooks on tensors, saved-tensor hooks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils import checkpoint as torch_checkpoint

from tests.fuzz.catalogue import WIDTH, LayerCall, Part, checkpoint


class _ReadsTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: float) -> Tensor:
        out = h.exp() * scale
        ctx.save_for_backward(h, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        h, _ = ctx.saved_tensors
        _, out = ctx.saved_tensors
        return grad * out + 0 * h, None


class _OnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: float) -> Tensor:
        ctx.h, ctx.scale = h.detach(), scale
        return h.square() * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * 2 * ctx.h * ctx.scale, None


class _InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: float) -> Tensor:
        h.mul_(scale)
        ctx.mark_dirty(h)
        ctx.scale = scale
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.scale, None


class _TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, scale: float) -> Any:
        index = h.argmax(-1)
        ctx.mark_non_differentiable(index)
        ctx.save_for_backward(h)
        ctx.set_materialize_grads(False)
        return h * scale, index

    @staticmethod
    def backward(ctx: Any, grad: Any, _: Any) -> Any:
        (h,) = ctx.saved_tensors
        return None if grad is None else grad * h.detach().cos(), None


class CustomFunction(Part):
    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        h = h.tanh()
        if self.k == 0:
            return _ReadsTwice.apply(h, 0.5)
        if self.k == 1:
            return _OnContext.apply(h, 0.5)
        if self.k == 2:
            return _InPlace.apply(h * 1, 0.5)
        out, index = _TwoOutputs.apply(h, 0.5)
        return out + index[:, None]


class InnerGrad(Part):
    """k: a gradient with a graph, without, by a parameter."""

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.energy = nn.Linear(WIDTH, 1)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        with torch.enable_grad():
            x = h if h.requires_grad and self.k == 0 else h.detach().requires_grad_()
            energy = self.energy(x).tanh().sum()
            wanted = self.energy.weight if self.k == 2 and self.energy.weight.requires_grad else x
            (force,) = torch.autograd.grad(energy, wanted, create_graph=self.k == 0)
        return h + force


class FuncGrad(Part):
    """A transform of `torch.func`, which wants no saved-tensor hooks."""

    refuses = ("UncheckpointableError",)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return h + torch.func.grad(lambda v: v.tanh().square().sum())(h)


class Vmapped(Part):
    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.map = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return torch.func.vmap(lambda row: self.map(row).sin())(h)


class GradModes(Part):
    """A piece of it without grad, with grad again, in inference mode, or cut off."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 0:
            with torch.no_grad():
                weight = (h * 2).sigmoid()
        elif self.k == 1:
            with torch.no_grad(), torch.enable_grad():
                weight = (h * 2).sigmoid()
        elif self.k == 2:
            with torch.inference_mode():
                weight = h.sigmoid() * 2
            weight = weight.clone()
        else:
            weight = h.detach().cos()
        return h * weight


class TensorHook(Part):
    """k: scales the gradient of the hidden state, of the input, keeps it, or hooks the node."""

    def at_entry(self, x: Tensor, call: LayerCall) -> Tensor:
        if self.k == 1 and x.requires_grad:
            x.register_hook(lambda grad: grad * 0.5)
        return x

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        h = h.sigmoid() * h
        if h.requires_grad:
            if self.k == 0:
                h.register_hook(lambda grad: grad * 0.5)
            elif self.k == 2:
                h.retain_grad()
            elif self.k == 3 and h.grad_fn is not None:
                h.grad_fn.register_prehook(lambda grads: tuple(g if g is None else g * 0.5 for g in grads))
        return h.exp() * 0.1


class SavedTensorHooks(Part):
    """k: offload, copies, half precision, a shape of its own; around a part of the layer."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        hooks: Any = [
            save_on_cpu(),
            saved_tensors_hooks(torch.clone, lambda t: t),
            saved_tensors_hooks(lambda t: (t.dtype, t.half()), lambda kept: kept[1].to(kept[0])),
            saved_tensors_hooks(lambda t: [t.detach()], lambda kept: kept[0] * 1),
        ][self.k]
        with hooks:
            h = h.sigmoid() * h
        return h.sin()


class InnerCheckpoint(Part):
    """k: torch's checkpoint, reentrant or not, and ours, once or nested; with dropout inside."""

    is_random = True
    excludes = ("function_mode",)  # which torch's recompute does not enter: plain training is wrong

    def __init__(self, k: int) -> None:
        super().__init__(k)
        self.map = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        if self.k == 0:
            return torch_checkpoint.checkpoint(self.map, h, use_reentrant=False, early_stop=False)
        if self.k == 1:
            return checkpoint(self.map, h)
        if self.k == 2:
            return checkpoint(lambda v: checkpoint(self.map, v.sin()).exp(), h.tanh())
        return torch_checkpoint.checkpoint(
            lambda v: checkpoint(self.map, v.sin()), h, use_reentrant=False, early_stop=False
        )


class TiedInside(Part):
    """Uses the layer's own weight a second time."""

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        return nn.functional.linear(h, call.layer.linear.weight.t() if self.k % 2 else call.layer.linear.weight)
