"""Ingredients and their catalogues: a class is entered under its name in snake case when it is defined."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from torch import Tensor, nn

import ckptdeco

WIDTH = 4
ROWS = 4


class Ingredient:
    """Something that a program may contain.

    Attributes:
        refuses: names of the errors that docs/explanation/limits.md allows for it; the program may end with one.
        is_random: draws random numbers, so `preserve_rng_state=False` may not be asked for.
        excludes: names of surroundings that plain torch does not bear with it.
        is_disabled: a limit that limits.md calls silent; never drawn, but it can be named in a program.
    """

    catalogue: ClassVar[dict[str, type[Any]]]
    refuses: ClassVar[tuple[str, ...]] = ()
    is_random: ClassVar[bool] = False
    excludes: ClassVar[tuple[str, ...]] = ()
    is_disabled: ClassVar[bool] = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Ingredient in cls.__bases__:  # a new kind of ingredient
            cls.catalogue = {}
        elif not cls.__name__.startswith("_"):
            cls.catalogue[name_of(cls)] = cls


def name_of(cls: type[Any]) -> str:
    """`PythonRandom` -> `python_random`."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", cls.__name__).lower()


def drawable(kind: type[Ingredient]) -> list[str]:
    """The names of a catalogue that a strategy may draw."""
    return sorted(name for name, cls in kind.catalogue.items() if not cls.is_disabled)


class Part(nn.Module, Ingredient):
    """A piece of a layer's forward; `k` from 0 to 3 chooses a variant.

    Attributes:
        wants: keyword arguments of the layer that it reads: "mask", "gate", "cache", "generator", "info".
        may_begin_late: whether it may be idle until a later step.
        is_lost_on_torch: whether it draws from a stream that torch's own checkpoint does not set back.
    """

    wants: ClassVar[tuple[str, ...]] = ()
    may_begin_late: ClassVar[bool] = True
    is_lost_on_torch: ClassVar[bool] = False

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k

    def at_entry(self, x: Tensor, call: LayerCall) -> Tensor:
        """Does something to the layer's input; returns it or another."""
        return x

    def forward(self, h: Tensor, call: LayerCall) -> Tensor:
        """Does something to the hidden state."""
        return h

    def reset(self) -> None:
        """Forgets what belongs to one step, before the next."""


class LayerCall:
    """What the parts of a layer see of its call."""

    def __init__(self, layer: nn.Module, x: Tensor, step: int, arguments: dict[str, Any]) -> None:
        self.layer = layer
        self.x = x
        self.step = step
        self.arguments = arguments
        self.extra: list[Tensor] = []  # returned beside the hidden state

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


class Move(Ingredient):
    """One line of the model's forward: what happens to a chain between, or around, layer calls."""

    @staticmethod
    def run(h: Tensor, env: Any, layer: int, k: int) -> Tensor:
        """Returns the chain's next tensor; `env` is the pass of `model.py`."""
        raise NotImplementedError


class Around(Ingredient):
    """Surroundings of a pass."""

    @staticmethod
    def enter() -> Any:
        """Returns a context manager."""
        raise NotImplementedError


class Between(Ingredient):
    """A change between forward and backward."""

    @staticmethod
    def apply(model: nn.Module, k: int) -> Any:
        """Makes the change; returns a function that undoes it after backward, or None."""
        raise NotImplementedError


class Backward(Ingredient):
    """A way to run backward."""

    @staticmethod
    def run(losses: list[Tensor], model: nn.Module, inputs: list[Tensor]) -> Any:
        """Runs it; returns what else there is to compare."""
        raise NotImplementedError


class Loop(Ingredient):
    """How one step of training is laid out."""

    n_batches: ClassVar[int] = 1

    @staticmethod
    def step(run: Any, batches: list[Any]) -> Any:
        """Runs one step; `run` is the run of `execute.py`. Returns what there is to compare."""
        raise NotImplementedError


class _Mode:
    is_plain = False  # this is the plain run


mode = _Mode()


def checkpoint(function: Any, *args: Any) -> Any:
    """The drop-in; the function itself in the plain run."""
    return function(*args) if mode.is_plain else ckptdeco.checkpoint(function, *args)


def parameters_of(model: nn.Module) -> list[Tensor]:
    """The parameters that take part in training."""
    return [p for p in model.parameters() if p.requires_grad]


def small(k: int) -> float:
    """0.2, 0.4, 0.6 or 0.8: a rate or a scale."""
    return 0.2 * (1 + k % 4)


def detached(value: Tensor | None) -> Tensor | None:
    """A copy without a graph."""
    return None if value is None else value.detach().clone()
