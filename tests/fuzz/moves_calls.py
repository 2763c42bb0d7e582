"""Ways in which the model's forward calls a layer."""

from __future__ import annotations

import contextvars
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint as torch_checkpoint

import ckptdeco
from tests.fuzz.catalogue import WIDTH, Move, checkpoint, mode
from tests.support.threads import on_thread


class Call(Move):
    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        return env.call(layer, h)


class Residual(Move):
    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        out = env.call(layer, h)
        return [h + out, out - h, torch.cat([h[:, :2], out[:, 2:]], -1), torch.maximum(h, out)][k]


class PlusEquals(Move):
    """`x += layer(x)`."""

    # On the CPU the first packs an alias, so that plain torch reads what was written later; the second lets a program
    # change what a layer saved (limits.md).
    excludes = ("offload", "copies_of_saved")

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        out = env.call(layer, h)
        if h.grad_fn is None:  # a leaf, or data: to change that before backward is an error
            return h + out
        h += out
        return h


class CallTwice(Move):
    """A shared layer; k: one after the other, side by side."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        return env.call(layer, env.call(layer, h)) if k % 2 else env.call(layer, h) + env.call(layer, h * 0.5)


class Merge(Move):
    """A tree: this chain and the other one, each through the layer, or one into the other."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        other = env.other()
        return env.call(layer, h) + env.call(layer, other) if k % 2 else env.call(layer, h + other)


class CallWithoutGrad(Move):
    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        with torch.no_grad():
            out = env.call(layer, h.clone())
        return h + out if k % 2 else out


class CallInInference(Move):
    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        with torch.inference_mode():
            out = env.call(layer, h.clone())
        return h + out.clone() if k % 2 else h + out


class CheckpointedCall(Move):
    """The call inside torch's checkpoint, or inside ours, with a neighbour."""

    excludes = ("function_mode",)  # which torch's recompute does not enter: plain training is wrong

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        if "cache" in env.layer(layer).wants:  # limits.md: what a function changes in its closure is changed again
            return env.call(layer, h)
        if any(part.is_lost_on_torch for part in env.layer(layer).parts):
            k |= 1  # else torch's recompute draws other numbers, and plain training is wrong
        call = env.bound(layer)
        if k == 0:
            return torch_checkpoint.checkpoint(call, h, use_reentrant=False, early_stop=False)
        if k == 1:
            return checkpoint(call, h)
        if k == 2:
            return torch_checkpoint.checkpoint(lambda v: call(v.sin()).sin(), h, use_reentrant=False, early_stop=False)
        return checkpoint(lambda v: call(call(v).sin()), h)


class CallWithoutPolicy(Move):
    """A part of the model under `policy(None)`, or under another policy."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        inner = ckptdeco.policy(None) if k % 2 or mode.is_plain else ckptdeco.policy(segment=2)
        with inner:
            return env.call(layer, h)


class CallOnThread(Move):
    """The call on another thread, which inherits the context (k odd) or not.

    Autograd numbers the nodes of each thread from 0, and adds up gradients whose nodes have the same number in an order
    that is not defined (limits.md). So each thread begins at a number of its own.
    """

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        context = contextvars.copy_context()
        grad, dtype = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")

        env.effects["thread"] += 1

        def work() -> Any:
            for _ in range(200 * (env.effects["thread"] % 8)):
                torch.ones((), requires_grad=True).clone()
            with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=dtype):
                return context.run(env.call, layer, h) if k % 2 else env.call(layer, h)

        return on_thread(work)


class CallWithHooks(Move):
    """Hooks on the layer itself: each counts, and changes something."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        module = env.layer(layer)

        def count(*args: Any) -> None:
            env.effects["hook"] += 1

        if k == 0:
            handle = module.register_forward_pre_hook(lambda m, args, kwargs: count(), with_kwargs=True)
        elif k == 1:
            handle = module.register_forward_hook(lambda m, args, out: count())
        elif k == 2:
            handle = module.register_full_backward_hook(lambda m, given, out: count())
        else:
            handle = module.register_forward_hook(lambda m, args, out: count(), always_call=True)
        out = env.call(layer, h)
        handle.remove()
        return out


class FailedCall(Move):
    """A call that fails, of which the caller knows better."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        try:
            env.bound(layer)(torch.ones(2, WIDTH + 1))
        except RuntimeError:
            env.effects["failed"] += 1
        return env.call(layer, h)


class ChangesLayer(Move):
    """An attribute, a mode or a flag of the layer, changed in the middle of the pass, for the calls that follow."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        module = env.layer(layer)
        if k == 0:
            module.scale = 1.5 - module.scale
        elif k == 1:
            module.train(not module.training)
        elif k == 2:
            module.note = {"scale": module.scale}
        else:
            module.linear.requires_grad_(not module.linear.weight.requires_grad)
        return env.call(layer, h)
