"""The classic schedules as rivals of a plan: which of them, if any, is faster within the same memory.

A rival can only win by what the table loses to rounding. So time and memory of all are bounded from below by sums over
the chain, and only the few that may win are simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from ckptdeco.schedule.actions import Schedule
from ckptdeco.schedule.classic import Binomial, EveryNth, Segments, StoreLast, TwoLevel
from ckptdeco.schedule.costs import calls_of
from ckptdeco.schedule.simulator import Layer, Simulation, simulate

_Make = Callable[[int], Schedule]


class Rivals:
    """Every n-th, segments of n and two levels, with the last k calls stored, for all n and k; Revolve for all n."""

    def __init__(self, chain: Sequence[Layer], head_bytes: int, np: Any) -> None:
        self.chain, self.head_bytes, self.np = chain, head_bytes, np
        self.calls = calls_of(chain, None)
        self.n = len(chain)
        self.plain_s = sum(layer.forward_s + layer.backward_s for layer in chain)
        self.found: dict[tuple[_Make, int, int], Simulation] = {}

    def schedule(self, make: _Make, size: int, k: int) -> Schedule:
        """The one of this size with the last k stored."""
        return StoreLast(make(size), k, self.n) if k else make(size)

    @cached_property
    def bounds(self) -> list[tuple[_Make, int, Any, Any]]:
        """Lower bounds of extra seconds and of the peak, for k = 0, 1, …, of each kind and size."""
        np = self.np
        stored = np.cumsum([0, *[call.saved_bytes for call in self.calls[::-1]]])
        turn = self.calls[-1].output_bytes + self.head_bytes
        found = []
        for size in range(1, self.n + 1):
            for make, *numbers in self._numbers(size):
                extra, kept, need = (np.array(values)[:0:-1] for values in numbers)
                peak = np.maximum(kept + stored[:-1] + turn, need)
                found.append((make, size, extra, peak) if make is not Binomial else (make, size, extra[:1], peak[:1]))
        return found

    def _numbers(self, size: int) -> Iterator[tuple[_Make, list[float], list[int], list[int]]]:
        """Of each kind, for 0, 1, … dropped calls: extra seconds, bytes after forward, bytes in backward."""
        alone: list[float] = [0.0]
        kept_alone: list[int] = [0]
        together, twice, kept, need, need_twice = [0.0], [0.0], [0], [0], [0]
        for start in range(0, self.n, size):
            base, base_twice, boundaries = together[-1], twice[-1], kept[-1]
            most, most_twice = need[-1], need_twice[-1]
            run = others = 0.0
            saved = inside = 0
            for i, call in enumerate(self.calls[start : start + size]):
                again_s = call.rerun_s - call.skipped_s if call.saved_bytes else 0.0
                alone.append(alone[-1] + (0.0 if i else again_s))
                kept_alone.append(kept_alone[-1] + (call.saved_bytes if i else call.input_bytes))
                run += call.rerun_s
                saved += call.saved_bytes
                if call.saved_bytes:  # a walk to it brings all before it in the segment back
                    together.append(base + run - call.skipped_s)
                    twice.append(base_twice + run - call.skipped_s + others)
                    most = max(most, boundaries + saved + call.gradient_bytes)
                    most_twice = max(most_twice, boundaries + inside + call.saved_bytes + call.gradient_bytes)
                else:
                    together.append(together[-1])
                    twice.append(twice[-1])
                others += again_s
                inside += call.input_bytes
                kept.append(boundaries + self.calls[start].input_bytes)
                need.append(most)
                need_twice.append(most_twice)
        yield EveryNth, alone, kept_alone, kept_alone
        yield Segments, together, kept, need
        if size > 1:
            yield TwoLevel, twice, kept, need_twice
            yield Binomial, twice, kept, kept

    def best(self, budget_bytes: int, below_s: float) -> tuple[Schedule, Simulation] | None:
        """The fastest within the budget, if any takes less than `below_s` seconds beyond the plain pass."""
        may_win = []
        for make, size, seconds, peaks in self.bounds:
            for k in self.np.flatnonzero((seconds < below_s) & (peaks <= budget_bytes)).tolist():
                may_win.append((float(seconds[k]), size, k, make))  # noqa: PERF401 - two loops read better
        best = None
        for seconds, size, k, make in sorted(may_win, key=lambda entry: entry[:3]):
            if seconds >= below_s:
                break
            key = make, size, k
            if key not in self.found:
                self.found[key] = simulate(self.chain, self.schedule(*key), head_bytes=self.head_bytes)
            result = self.found[key]
            if result.peak_bytes <= budget_bytes and result.elapsed_s - self.plain_s < below_s:
                best = self.schedule(*key), result
                below_s = result.elapsed_s - self.plain_s
        return best
