"""Decorated things in a module that can be imported, so that they can be pickled."""

from __future__ import annotations

import torch
from torch import nn

from tests.support import meters
from tests.support.layers import DIM
from tests.support.subject import checkpointable


@checkpointable
def function(x: torch.Tensor, weight: torch.Tensor, /, *, scale: float = 2.0) -> torch.Tensor:
    """A decorated function."""
    meters.tick("function")
    return torch.tanh(x @ weight) * scale


def undecorated(x: torch.Tensor, weight: torch.Tensor, /, *, scale: float = 2.0) -> torch.Tensor:
    """A decorated function."""
    meters.tick("function")
    return torch.tanh(x @ weight) * scale


class Kinds(nn.Module):
    """One method of each kind, all of them tanh(x @ weight)."""

    label = "Kinds"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    @checkpointable
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """The forward of Kinds."""
        meters.tick(self.label)
        return torch.tanh(x @ self.weight) * scale

    @checkpointable
    def other(self, x: torch.Tensor) -> torch.Tensor:
        """A method that is not forward."""
        meters.tick("other")
        return torch.tanh(x @ self.weight)

    @checkpointable
    @classmethod
    def of_class(cls, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A class method decorated from outside."""
        meters.tick(f"of_class {cls.__name__}")
        return torch.tanh(x @ weight)

    @classmethod
    @checkpointable
    def of_class_inside(cls, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A class method decorated from inside."""
        meters.tick(f"of_class_inside {cls.__name__}")
        return torch.tanh(x @ weight)

    @checkpointable
    @staticmethod
    def static(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A static method decorated from outside."""
        meters.tick("static")
        return torch.tanh(x @ weight)

    @staticmethod
    @checkpointable
    def static_inside(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """A static method decorated from inside."""
        meters.tick("static_inside")
        return torch.tanh(x @ weight)


class Inherits(Kinds):
    """Inherits the decorated forward."""

    label = "Inherits"


class CallsSuper(Kinds):
    """An undecorated forward that calls the decorated one."""

    label = "CallsSuper"

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) + x


class DecoratesAgain(Kinds):
    """A decorated forward that calls the decorated one."""

    label = "DecoratesAgain"

    @checkpointable
    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x, scale) + x


class Bare(nn.Module):
    """Not decorated; tests wrap it on the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The forward of Bare."""
        meters.tick("Bare")
        return torch.tanh(x @ self.weight)


class Chain(nn.Module):
    """Runs its layers one after the other."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x
