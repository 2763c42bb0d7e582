"""Timing side by side: every variant runs once per round, and only figures of the same round are compared."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Collect once, then keep the garbage collector out of what is timed."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def interleaved(
    steps: Mapping[str, Callable[[], object]],
    n_rounds: int,
    *,
    n_warmup: int = 1,
    clock: Callable[[], float] = time.thread_time,
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Time each step once per round, in an order that turns from round to round.

    On a machine that is busy with other things, whole runs cannot be compared: they meet different loads. Steps of
    one round run within milliseconds of each other, so their ratios and differences are steady.

    Args:
        steps: what to time, by name.
        n_rounds: how often each step is timed.
        n_warmup: rounds that run first and are not counted.
        clock: seconds; the default counts only the time this thread was on a processor, which leaves out preemption.
            A step that works in several threads needs ``time.perf_counter``.
        on_step: called after each step, outside the timing (progress bars).

    Returns:
        for each name the seconds of its rounds, so that index i of two lists belongs together.

    Cost:
        ``(n_warmup + n_rounds)`` runs of each step; garbage is collected between rounds, not during a step.
    """
    names = list(steps)
    elapsed_s: dict[str, list[float]] = {name: [] for name in names}
    for round_index in range(-n_warmup, n_rounds):
        turn = round_index % len(names)
        order = names[turn:] + names[:turn]
        if round_index % 2:
            order.reverse()
        with gc_paused():
            for name in order:
                start = clock()
                steps[name]()
                taken = clock() - start
                if round_index >= 0:
                    elapsed_s[name].append(taken)
                on_step()
    return elapsed_s


def median_difference(values: Sequence[float], baseline: Sequence[float]) -> float:
    """The median of ``value - baseline`` over the rounds."""
    return statistics.median(value - base for value, base in zip(values, baseline, strict=True))


def median_ratio(values: Sequence[float], baseline: Sequence[float]) -> float:
    """The median of ``value / baseline`` over the rounds."""
    return statistics.median(value / base for value, base in zip(values, baseline, strict=True))
