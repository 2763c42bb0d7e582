"""A schedule that was worked out for one chain: a tree of nested recomputes, written down as one walk per target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckptdeco.schedule.actions import Action
from ckptdeco.schedule.simulator import Option

SAVE, DROP_KEEP, DROP = Action.SAVE, Action.DROP_KEEP, Action.DROP


@dataclass(frozen=True, slots=True)
class Walk:
    """How one target is brought back: from which call on, and what is done with each call on the way."""

    first: int
    actions: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Planned:
    """Answers what was worked out for each call.

    A node (i, l) of the tree keeps the input of i, lacks the saved tensors of i to l and is solved from l downwards.
    Backward needs l first, so each node begins with exactly one walk, and no two nodes have the same l: what is
    done on the way depends on the target alone. A question that the plan did not foresee (a boundary that is
    alive by chance, a backward through part of the graph) gets the answer of the walk that brings the target back
    in passing, from the call that was asked for.

    Args:
        actions: of each call in forward.
        walks: of each target; None for a call whose saved tensors are there when backward needs them.
        options: by which `Option` of its menu each call is dropped; None for the plain way; () if all are.

    Cost:
        As the plan says that it is part of. A call past the chain is a segment of its own (R37).
    """

    actions: tuple[Action, ...]
    walks: tuple[Walk | None, ...]
    options: tuple[Option | None, ...] = ()

    @property
    def longest(self) -> int:
        """The most calls that one walk runs."""
        return max((len(walk.actions) for walk in self.walks if walk is not None), default=1)

    def forward(self, position: int) -> Action:
        """As planned; a call past the chain keeps its input."""
        return self.actions[position] if position < len(self.actions) else DROP_KEEP

    def option(self, position: int) -> Option | None:
        """The way the call is dropped."""
        return self.options[position] if position < len(self.options) else None

    def backward(self, first: int, target: int) -> Sequence[Action]:
        """As planned for the target, from `first` on."""
        if target >= len(self.walks):
            return (SAVE,) * (target - first + 1)
        walk = self.walks[target]
        if walk is None:
            passing = (w for w in self.walks[target:] if w is not None and w.first <= target)
            walk = next(passing, Walk(target, (SAVE,)))
        actions = walk.actions[max(0, first - walk.first) : target - walk.first]
        return (*(DROP,) * (walk.first - first), *actions, SAVE)
