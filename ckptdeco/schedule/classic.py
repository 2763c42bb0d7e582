"""The schedules that need no measurement: segments, every n-th call, two levels, binomial, and the last ones stored."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import comb, isqrt

from ckptdeco.errors import PolicyError
from ckptdeco.schedule.actions import Action, Schedule

SAVE, DROP_KEEP, DROP = Action.SAVE, Action.DROP_KEEP, Action.DROP


def _require_count(name: str, value: object, least: int = 1) -> None:
    if type(value) is not int or value < least:
        raise PolicyError(name, value, f"must be a whole number of at least {least}", f"use {name}={least} or more")


def sqrt_segment(length: int) -> int:
    """Returns Chen's segment length for a chain of `length` layer calls, ⌊√length⌋.

    Cost:
        Of all n it has the least ⌈length/n⌉ + n: boundaries plus layers held at once.

    Example:
        >>> sqrt_segment(100), sqrt_segment(24)
        (10, 4)

    References:
        Chen et al. 2016, Training Deep Nets with Sublinear Memory Cost.
    """
    _require_count("length", length)
    return isqrt(length)


@dataclass(frozen=True, slots=True)
class Segments:
    """Each `n` consecutive calls share one boundary and are recomputed together.

    Cost:
        Memory: ⌈L/n⌉ boundaries after forward, plus the saved tensors of n layers in backward. Compute: one more
        forward of each layer.
    """

    n: int

    def __post_init__(self) -> None:
        _require_count("n", self.n)

    def forward(self, position: int) -> Action:
        """Keeps the input of the first call of each segment."""
        return DROP if position % self.n else DROP_KEEP

    def backward(self, first: int, target: int) -> Sequence[Action]:
        """Recomputes all with saved tensors, so that each is recomputed once."""
        return (SAVE,) * (target - first + 1)


@dataclass(frozen=True, slots=True)
class EveryNth:
    """Calls 0, n, 2n… are recomputed, each alone; the others are stored.

    Cost:
        Memory: ⌈L/n⌉ boundaries and the saved tensors of all other layers. Compute: one more forward of ⌈L/n⌉ layers.
    """

    n: int

    def __post_init__(self) -> None:
        _require_count("n", self.n)

    def forward(self, position: int) -> Action:
        """Drops every n-th call."""
        return SAVE if position % self.n else DROP_KEEP

    def backward(self, first: int, target: int) -> Sequence[Action]:
        """Recomputes the one call."""
        return (SAVE,) * (target - first + 1)


@dataclass(frozen=True, slots=True)
class TwoLevel:
    """As `Segments`, but a segment is rebuilt boundary by boundary and each layer is then recomputed alone.

    Cost:
        Memory: ⌈L/n⌉ boundaries after forward, n − 1 more while a segment is in backward, plus the saved tensors
        of *one* layer. Compute: at most two more forwards of each layer; the last of a segment needs one.
    """

    n: int

    def __post_init__(self) -> None:
        _require_count("n", self.n)

    def forward(self, position: int) -> Action:
        """Keeps the input of the first call of each segment."""
        return DROP if position % self.n else DROP_KEEP

    def backward(self, first: int, target: int) -> Sequence[Action]:
        """Keeps the input of each call on the way to the target."""
        return (DROP_KEEP,) * (target - first) + (SAVE,)


@dataclass(frozen=True, slots=True)
class Binomial:
    """As `Segments`, but each segment is reversed by Revolve with O(log n) boundaries.

    A segment of n calls gets s boundaries, its own included, s being least with C(2s, s) >= n. The plan is a tree:
    a node (start, end, s) keeps the input of a middle call, solves the right part with s − 1, frees it, and solves
    the left part with s. No state is carried: `backward` finds the node again from its two arguments.

    Args:
        n: calls in a segment, or None for the whole chain.
        length: calls in the chain, only with `n=None`; a call past it is a segment of its own.

    Cost:
        Memory: ⌈L/n⌉ boundaries after forward, s − 1 more in backward, plus the saved tensors of one layer.
        Compute: one forward with saved tensors and at most s without, for each layer, beyond the first forward.

    References:
        Griewank & Walther 2000, Algorithm 799: Revolve. Differs: the sweep that rebuilds the first boundaries is
        run in backward, since forward cannot know where the segment ends.
    """

    n: int | None
    length: int | None = None

    def __post_init__(self) -> None:
        if (self.n is None) == (self.length is None):
            raise PolicyError("n", self.n, "needs a length exactly when it is None", "give n, or n=None and length")
        if self.n is not None:
            _require_count("n", self.n)
        else:
            _require_count("length", self.length)

    def _segment(self, position: int) -> tuple[int, int]:
        """Where the segment of `position` starts and ends."""
        if self.n is not None:
            start = position - position % self.n
            return start, start + self.n
        assert self.length is not None
        return (0, self.length) if position < self.length else (position, position + 1)

    def forward(self, position: int) -> Action:
        """Keeps the input of the first call of each segment."""
        return DROP_KEEP if self._segment(position)[0] == position else DROP

    def backward(self, first: int, target: int) -> Sequence[Action]:
        """Keeps the inputs that the recursion tree wants on the way to the target."""
        start, end = self._segment(target)
        kept = {first, start}
        n_boundaries = n_boundaries_for(end - start)
        while n_boundaries > 1 and end - start > 1:
            middle = start + split(end - start, n_boundaries)
            if target < middle:
                end = middle
            else:  # the right part comes first; a middle past `first` is not kept yet
                kept.add(middle)
                start, n_boundaries = middle, n_boundaries - 1
        return (*(DROP_KEEP if call in kept else DROP for call in range(first, target)), SAVE)


@lru_cache(maxsize=1024)
def n_boundaries_for(n: int) -> int:
    """The least s with C(2s, s) >= n: as many boundaries as repetitions."""
    s = 1
    while comb(2 * s, s) < n:
        s += 1
    return s


@lru_cache(maxsize=4096)
def split(n: int, s: int) -> int:
    """How many calls to run before the next boundary, to reverse `n` of them with `s` boundaries in least time.

    With t the least number of repetitions, C(s+t, s) >= n, every k that leaves the left part within t − 1
    repetitions and the right part within t is optimal; this is the largest (Griewank & Walther 2000, section 3).
    """
    t = 1
    while comb(s + t, s) < n:
        t += 1
    return min(comb(s + t - 1, s), n - comb(s + t - 2, s - 1))


@dataclass(frozen=True, slots=True)
class StoreLast:
    """As `inner`, but the last `k` of `length` calls are stored; a call past `length` is a segment of its own.

    With `k=0` it only guards a schedule that was made for `length` calls against longer chains (R37).

    Cost:
        Memory: the saved tensors of k layers stay; they come when all boundaries are held, so they raise the peak
        unless backward needs as much anyway. Compute: k forwards less than `inner`.
    """

    inner: Schedule
    k: int
    length: int

    def __post_init__(self) -> None:
        _require_count("k", self.k, least=0)
        _require_count("length", self.length)

    def forward(self, position: int) -> Action:
        """Stores the last `k` calls."""
        if position >= self.length:
            return DROP_KEEP
        return SAVE if position >= self.length - self.k else self.inner.forward(position)

    def backward(self, first: int, target: int) -> Sequence[Action]:
        """As `inner`."""
        return self.inner.backward(first, target)


@dataclass(frozen=True, slots=True)
class StoreAll:
    """Stores everything, as without checkpointing.

    Cost:
        Memory: the saved tensors of all layers. Compute: none.
    """

    def forward(self, position: int) -> Action:
        """Stores the call."""
        return SAVE

    def backward(self, first: int, target: int) -> Sequence[Action]:
        """Recomputes all with saved tensors; not asked for, since nothing is dropped."""
        return (SAVE,) * (target - first + 1)
