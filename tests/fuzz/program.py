"""Programs as values: their `repr` is the code that makes them again, which `python -m tests.fuzz.replay` takes."""

from __future__ import annotations

import dataclasses
import importlib
from pathlib import Path
from typing import Any

from tests.fuzz.catalogue import Around, Backward, Between, Ingredient, Loop, Move, Part

for _module in sorted(Path(__file__).parent.glob("parts_*.py")):
    importlib.import_module(f"tests.fuzz.{_module.stem}")
for _name in ("moves_calls", "moves_between", "loops", "backwards", "betweens", "arounds"):
    importlib.import_module(f"tests.fuzz.{_name}")


@dataclasses.dataclass(frozen=True)
class P:
    """A part of a layer: its name in the catalogue, the variant, the first step in which it does something."""

    name: str
    k: int = 0
    since: int = 0


@dataclasses.dataclass(frozen=True)
class L:
    """A layer: its parts, and how it takes its input and gives its output (names in `layer.py`)."""

    parts: tuple[P, ...] = ()
    takes: str = "plain"
    gives: str = "plain"
    trains: bool = True  # else its own weights are frozen


@dataclasses.dataclass(frozen=True)
class M:
    """A move: its name, the chain, the layer and the variant."""

    name: str
    chain: int = 0
    layer: int = 0
    k: int = 0


@dataclasses.dataclass(frozen=True)
class B:
    """A change between forward and backward, and its variant."""

    name: str
    k: int = 0


@dataclasses.dataclass(frozen=True)
class Program:
    """Everything that a run needs.

    Attributes:
        policies: arguments of the policies, taken in turn step by step.
        place: where a policy is entered: "forward", "step", "all" steps at once, "decorator" or "generator".
        tied: whether layers share the weight of the first.
    """

    layers: tuple[L, ...]
    code: tuple[M, ...]
    policies: tuple[dict[str, Any], ...] = ({"segment": 1},)
    loop: str = "single"
    backward: str = "sum"
    between: tuple[B, ...] = ()
    around: tuple[str, ...] = ()
    place: str = "forward"
    optimizer: str = "sgd"
    tied: bool = False
    steps: int = 3
    seed: int = 0

    def __repr__(self) -> str:
        said = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                said.append(f"{field.name}={_shown(value)}")
        return f"Program({', '.join(said)})"

    def ingredients(self) -> list[type[Ingredient]]:
        """The classes of all that it contains."""
        found: list[type[Ingredient]] = [Loop.catalogue[self.loop], Backward.catalogue[self.backward]]
        found += [Part.catalogue[part.name] for layer in self.layers for part in layer.parts]
        found += [Move.catalogue[move.name] for move in self.code]
        found += [Between.catalogue[change.name] for change in self.between]
        found += [Around.catalogue[name] for name in self.around]
        return found

    def refusals(self) -> dict[str, str]:
        """Errors that limits.md allows this program, each with the ingredient it is allowed for."""
        return {error: cls.__name__ for cls in self.ingredients() for error in cls.refuses}


def _shown(value: Any) -> str:
    """As `repr`, but dataclasses without the fields that have their default."""
    if isinstance(value, tuple):
        inner = ", ".join(map(_shown, value))
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if dataclasses.is_dataclass(value):
        said = []
        for i, field in enumerate(dataclasses.fields(value)):
            item = getattr(value, field.name)
            if i == 0 and field.name == "name":
                said.append(repr(item))
            elif item != field.default:
                said.append(f"{field.name}={_shown(item)}")
        return f"{type(value).__name__}({', '.join(said)})"
    return repr(value)


def read(text: str) -> Program:
    """The program that this text describes."""
    made = eval(text, {"Program": Program, "L": L, "P": P, "M": M, "B": B})
    assert isinstance(made, Program), f"not a program: {text}"
    return made
