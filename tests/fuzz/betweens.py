"""Changes between forward and backward: toggles, other passes, draws; and those that cannot be made good."""

from __future__ import annotations

import gc
import random
from typing import Any

import numpy
import torch
from torch import nn

from tests.fuzz.catalogue import Between


class Eval(Between):
    """Other modes, until after backward (k even) or for good."""

    @staticmethod
    def apply(model: nn.Module, k: int) -> Any:
        model.eval()
        return model.train if k % 2 == 0 else None


class EvalOfOne(Between):
    @staticmethod
    def apply(model: Any, k: int) -> Any:
        layer = model.layers[k % len(model.layers)]
        layer.train(not layer.training)


class Freeze(Between):
    @staticmethod
    def apply(model: Any, k: int) -> Any:
        layer = model.layers[k % len(model.layers)]
        before = [(p, p.requires_grad) for p in layer.parameters()]
        layer.requires_grad_(False)
        return lambda: [p.requires_grad_(flag) for p, flag in before]


class Attribute(Between):
    @staticmethod
    def apply(model: Any, k: int) -> Any:
        layer = model.layers[k % len(model.layers)]
        layer.scale = 0.25 + layer.scale
        layer.added = k


class Adapters(Between):
    """Adapters are switched, as between a policy and its reference model."""

    @staticmethod
    def apply(model: Any, k: int) -> Any:
        for module in model.modules():
            if hasattr(module, "enabled"):
                module.enabled = not module.enabled


class Step(Between):
    """The loop already says that the next step begins."""

    @staticmethod
    def apply(model: Any, k: int) -> Any:
        for layer in model.layers:
            layer.step += 1 + k


class Draws(Between):
    @staticmethod
    def apply(model: Any, k: int) -> Any:
        torch.rand(3)
        random.random()
        numpy.random.rand(2)
        torch.rand(2, generator=model.streams[0])
        if k % 2:
            torch.manual_seed(k)
            random.seed(k)
            numpy.random.seed(k)


class SmallBuffers(Between):
    """Buffers that the layers keep are set by someone else."""

    @staticmethod
    def apply(model: Any, k: int) -> Any:
        with torch.no_grad():
            for buffer in model.buffers():
                if k % 2:
                    buffer.zero_()
                else:
                    buffer.data = buffer.data + 1


class Forget(Between):
    """State of the step is dropped before backward."""

    @staticmethod
    def apply(model: Any, k: int) -> Any:
        for layer in model.layers:
            for part in layer.parts:
                part.reset()


class Collect(Between):
    @staticmethod
    def apply(model: Any, k: int) -> Any:
        gc.collect(0)


class ZeroGrad(Between):
    @staticmethod
    def apply(model: Any, k: int) -> Any:
        model.zero_grad(set_to_none=k % 2 == 0)


class Export(Between):
    """What people do with a model: state dict, copy of its weights, names."""

    @staticmethod
    def apply(model: Any, k: int) -> Any:
        {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.requires_grad)


class Weights(Between):
    """A step of the optimizer, new memory for the weights, or the same values loaded again."""

    refuses = ("ParameterModifiedError",)

    @staticmethod
    def apply(model: Any, k: int) -> Any:
        layer = model.layers[k % len(model.layers)]
        with torch.no_grad():
            if k == 0:
                layer.linear.bias.add_(0.1)
            elif k == 1:
                layer.linear.weight.data = layer.linear.weight.data * 0.9
            elif k == 2:
                layer.load_state_dict(layer.state_dict())
            else:
                for parameter in model.parameters():
                    parameter.mul_(0.99)


class OtherParameter(Between):
    """A parameter is replaced by another, until after backward."""

    @staticmethod
    def apply(model: Any, k: int) -> Any:
        linear = model.layers[k % len(model.layers)].linear
        before = linear.bias
        linear.bias = nn.Parameter(torch.zeros_like(before))

        def undo() -> None:
            linear.bias = before

        return undo
