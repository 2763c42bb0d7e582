"""The language that schedules, the simulator, the engine and the report share."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias


class Action(enum.Enum):
    """What is done with one layer call, at forward or when it is recomputed.

    At forward `SAVE` stores the saved tensors (the call runs plainly), `DROP_KEEP` drops them and keeps the
    call's input as a boundary, `DROP` drops both. In a recompute `SAVE` makes the saved tensors anew,
    `DROP_KEEP` makes none and keeps the input as a new boundary, `DROP` makes and keeps none.
    """

    SAVE = "save"
    DROP_KEEP = "drop_keep"
    DROP = "drop"

    def __repr__(self) -> str:
        return f"Action.{self.name}"


class Schedule(Protocol):
    """Answers what to do with each layer call of a chain.

    Positions are 0-based in the chain. A `DROP` call with nothing to recompute it from (the first of a chain, or
    one that follows a stored call) is treated as `DROP_KEEP`.
    """

    def forward(self, position: int) -> Action:
        """What to do with the call at `position` in the forward pass."""
        ...

    def backward(self, first: int, target: int) -> Sequence[Action]:
        """How the calls `first` to `target`, both included, are run to have the saved tensors of `target` back.

        `first` is the nearest call whose input is kept; the last action is always `SAVE`.
        """
        ...


@dataclass(frozen=True, slots=True)
class Kept:
    """From here on `n_bytes` more are held for the call: a boundary, saved tensors, or both."""

    call: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Dropped:
    """The call returned and `n_bytes` of its saved tensors were let go; an input that is kept is not among them."""

    call: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The forward of the call was run again, with or without its saved tensors."""

    call: int


@dataclass(frozen=True, slots=True)
class Freed:
    """The call's backward is done: all that was kept for it, `n_bytes`, is let go."""

    call: int
    n_bytes: int


Event: TypeAlias = Kept | Dropped | Recomputed | Freed
