"""What is known of a chain when a pass begins, and the schedule that follows from it and from a policy's numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ckptdeco.schedule.actions import Schedule
from ckptdeco.schedule.classic import Binomial, EveryNth, Segments, StoreLast, TwoLevel, sqrt_segment
from ckptdeco.schedule.simulator import Layer, best_segment

_LEVELS: dict[Any, Callable[[int], Schedule]] = {1: Segments, 2: TwoLevel, "log": Binomial}


class Chain:
    """What is known of a chain from the last pass through it; make a new one for each pass.

    Args:
        length: layer calls in it, or None if not known; default the number of `costs`.
        costs: what each call costs, or None if not measured.
    """

    __slots__ = ("bound", "costs", "length")

    def __init__(self, length: int | None = None, costs: tuple[Layer, ...] | None = None) -> None:
        self.length = len(costs) if length is None and costs is not None else length
        self.costs = costs
        self.bound: tuple[Any, Schedule] | None = None  # the policy that asked last, and its schedule

    def __repr__(self) -> str:
        return f"Chain(length={self.length}, costs={'measured' if self.costs else None})"


@functools.lru_cache(maxsize=256)
def resolve(
    segment: int | str | None,
    every: int | None,
    levels: int | str,
    keep_last: int,
    length: int | None,
    costs: tuple[Layer, ...] | None,
) -> Schedule:
    """The schedule of a chain, as `segment`, `every`, `levels` and `keep_last` of a policy say.

    While it needs a length or costs that are not known, each call is a segment of its own; a schedule that was made
    for a length is guarded against longer chains (R37).
    """
    n_inner = None if length is None else length - keep_last
    if every is not None:
        inner: Schedule = EveryNth(every)
    elif type(segment) is int:
        inner = _LEVELS[levels](segment)
    elif n_inner is None or (segment == "auto" and costs is None):
        return Segments(1)
    elif n_inner < 1:
        inner = Segments(1)
    elif segment is None:
        inner = Binomial(None, n_inner)
    elif segment == "sqrt":
        inner = _LEVELS[levels](sqrt_segment(n_inner))
    else:
        assert costs is not None
        inner = _LEVELS[levels](best_segment(costs[:n_inner], _LEVELS[levels]))
    needs_length = keep_last > 0 or (type(segment) is not int and every is None)
    return StoreLast(inner, min(keep_last, length), length) if needs_length and length else inner
