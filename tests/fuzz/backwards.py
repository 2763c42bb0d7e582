"""Ways to run backward over the losses of one pass."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from tests.fuzz.catalogue import Backward, detached, parameters_of


def _sum(losses: list[Tensor]) -> Tensor:
    return torch.stack(losses).sum()


class Sum(Backward):
    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        _sum(losses).backward()


class Twice(Backward):
    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        loss = _sum(losses)
        loss.backward(retain_graph=True)
        loss.backward()


class OneByOne(Backward):
    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        for loss in losses[:-1]:
            loss.backward(retain_graph=True)
        losses[-1].backward()


class InReverse(Backward):
    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        for loss in losses[:0:-1]:
            loss.backward(retain_graph=True)
        losses[0].backward()


class Partial(Backward):
    """Half of the parameters first, then all."""

    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        half = parameters_of(model)[::2]
        got = torch.autograd.grad(_sum(losses), half, retain_graph=True, allow_unused=True)
        _sum(losses).backward()
        return [*map(detached, got)]


class OfOne(Backward):
    """The gradient of the first loss by an input, and no more; the graph is left unused."""

    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        got = torch.autograd.grad(losses[0], inputs[:1], retain_graph=True, allow_unused=True)
        return [*map(detached, got)]


class InputsOnly(Backward):
    """`backward(inputs=…)` for some leaves, then for others."""

    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        some = parameters_of(model)
        _sum(losses).backward(inputs=some[: len(some) // 2 + 1], retain_graph=True)
        _sum(losses).backward(inputs=[*some[len(some) // 2 + 1 :], *inputs])


class Double(Backward):
    """A second backward through the first."""

    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        loss = _sum(losses)
        got = torch.autograd.grad(loss, parameters_of(model), create_graph=True, allow_unused=True)
        penalty = [g.square().sum() for g in got if g is not None and g.requires_grad]
        torch.stack([loss, *penalty]).sum().backward()
        return [*map(detached, got)]


class GradientPenalty(Backward):
    """The norm of the input's gradient is part of the loss."""

    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        loss = _sum(losses)
        (grad,) = torch.autograd.grad(loss, inputs[:1], create_graph=True, allow_unused=True)
        penalty = (grad.norm() - 1) ** 2 if grad is not None and grad.requires_grad else loss.detach()
        (loss + penalty).backward()
        return detached(grad)


class CreateGraph(Backward):
    """`backward(create_graph=True)`, with the graph let go."""

    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        leaves = [*parameters_of(model), *inputs]
        torch.autograd.backward(_sum(losses), create_graph=True, inputs=leaves)
        for leaf in leaves:
            leaf.grad = detached(leaf.grad)


class OnThread(Backward):
    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        errors: list[BaseException] = []

        def run() -> None:
            try:
                _sum(losses).backward()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]


class PerSample(Backward):
    """Many gradients of one graph, row by row (influence, Jacobians)."""

    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        some = parameters_of(model)[:3]
        got = []
        for loss in [losses[0], losses[-1] * 2]:
            got += torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True)
        _sum(losses).backward()
        return [*map(detached, got)]


class Nothing(Backward):
    """The graph is dropped."""

    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        return None
