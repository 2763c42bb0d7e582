"""What people write between the layers, in the model's forward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tests.fuzz.catalogue import WIDTH, Move, small


class Plain(Move):
    """An operation between the layers."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        return [lambda: h * 0.7, lambda: h + 0.1, lambda: h.clamp(-3, 3), lambda: h.sin()][k]()


class Dropout(Move):
    is_random = True

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        return functional.dropout(h, small(k))


class View(Move):
    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        if k == 0:
            return h.view_as(h)
        if k == 1:
            return h.reshape(2, -1, WIDTH).view(-1, WIDTH)
        if k == 2:
            return torch.cat(h.chunk(2, -1)[::-1], -1)
        return torch.complex(h.float(), h.float()).conj().real


class Cut(Move):
    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        return [h.detach(), h.detach().requires_grad_(), h.clone(), h.detach().clone()][k]


class Cast(Move):
    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        return h.to([torch.float64, torch.bfloat16, torch.float64, torch.float16][k]).to(h.dtype)


class Skip(Move):
    """An older value of any chain is added."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        return h + env.older[-1 - (layer + k) % len(env.older)]


class Jump(Move):
    """The chain goes back to an older value, which so gets several consumers."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        return env.older[-1 - (layer + k) % len(env.older)]


class Hold(Move):
    """The caller keeps the tensor to the end; it takes part in the loss."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        env.held.append(h)
        return h


class Side(Move):
    """What the chain is now becomes the side input of the layers that follow."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        env.gate = h if k % 2 else h.detach()
        return h * 0.5


class HookOnTensor(Move):
    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        if h.requires_grad:
            if k == 3:
                h.retain_grad()
                env.retained.append(h)
            else:
                h.register_hook(lambda grad: env.count("tensor hook") or (grad * 0.5 if k else None))
        return h


class InPlace(Move):
    """The loop writes to what a layer returned."""

    excludes = ("offload",)  # as for `x += layer(x)`

    refuses = ("InputModifiedError", "ModifiedTensorError")

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        if h.is_leaf and h.requires_grad:
            return h * 0.9
        return [lambda: h.add_(0.1), lambda: h.mul_(0.9), lambda: h.clamp_(-2, 2), lambda: h.tanh_()][k]()


class GradMidway(Move):
    """A gradient, or a backward, in the middle of the pass."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        if not h.requires_grad or not env.x.requires_grad or not torch.is_grad_enabled():
            return h
        if k == 3:
            h.sum().backward(retain_graph=True)
            return h
        (grad,) = torch.autograd.grad(h.sum(), env.x, retain_graph=True, create_graph=k == 0, allow_unused=True)
        return h if grad is None else h + grad.reshape(h.shape)
