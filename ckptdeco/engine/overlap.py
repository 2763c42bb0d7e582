"""Layer calls that run on several threads at once, and the generators of the process that these share (R19).

What a thread draws between two draws of a layer call on another is missing in the recompute of that call, which would
see other numbers. So each call and each recompute is a window, and a call that drew from a shared generator while
another thread had a window open is stored. So is one during which another thread's recompute set a generator back or
restored it: it may seem to have drawn nothing. No lock is held while user code runs (R35).

Threads that draw outside of layer calls are seen too late for that: in the recompute, whose generators end elsewhere
than those of forward did. It is tried again, since it may be the recompute that was disturbed; otherwise it is an
error, unless the layer turns out to draw nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from threading import get_ident
from typing import Any, TypeVar

from ckptdeco.errors import RecomputeError

__all__ = ["Window", "disturbed", "has_other_threads", "rewinds", "run_in_window"]

T = TypeVar("T")

_depths: dict[int, int] = {}  # by thread: open windows, one inside the other


class _Latest:
    """The thread that opened or closed a window last, and how often that was another one than before."""

    thread = 0
    n_changes = 0


_latest = _Latest()


def _touch(thread: int) -> int:
    if _latest.thread != thread:
        _latest.thread = thread
        _latest.n_changes += 1
    return _latest.n_changes


class _Rewinds:
    """How often recomputes set a shared generator back or restored it; by thread, and those that are at it."""

    def __init__(self) -> None:
        self.by_thread: dict[int, int] = {}
        self.at_it: dict[int, int] = {}

    def begin(self) -> None:
        """A recompute on this thread is about to set generators back."""
        thread = get_ident()
        self.at_it[thread] = self.at_it.get(thread, 0) + 1
        self.by_thread[thread] = self.by_thread.get(thread, 0) + 1

    def end(self) -> None:
        """It has restored them."""
        thread = get_ident()
        if self.at_it.get(thread, 0) > 1:
            self.at_it[thread] -= 1
        else:
            self.at_it.pop(thread, None)

    def of_others(self, thread: int) -> tuple[int, bool]:
        """How often other threads did it, and whether one is at it."""
        if not self.by_thread:
            return 0, False
        n = sum(self.by_thread.copy().values()) - self.by_thread.get(thread, 0)
        return n, len(self.at_it) > (thread in self.at_it)


rewinds = _Rewinds()
_IDLE = frozenset({"tqdm._monitor"})  # wakes up now and then to refresh progress bars


def has_other_threads() -> bool:
    """Whether the program has started further threads of Python's that may draw numbers."""
    if threading.active_count() <= 1:
        return False
    return sum([type(thread).__module__ not in _IDLE for thread in threading.enumerate()]) > 1


def disturbed(label: str) -> RecomputeError:
    """The error for a recompute that did not draw what forward drew."""
    return RecomputeError(
        label,
        "drew other random numbers than forward did, because another thread drew from the same generator meanwhile",
        "give each thread a torch.Generator of its own, or draw on one thread at a time.",
    )


class Window:
    """The time from its making to `close`, in which a layer call runs, first or again.

    Cost:
        Compute: well under 1 µs a call.
    """

    __slots__ = ("depth", "is_rewound", "is_shared", "n_changes", "rewinds", "thread")

    def __init__(self) -> None:
        self.thread = thread = get_ident()
        self.depth = _depths.get(thread, 0)
        self.n_changes = _touch(thread)
        self.is_shared = False
        self.is_rewound = False  # a generator of the process was not where this thread left it
        self.rewinds = rewinds.of_others(thread)

    def open(self) -> None:
        """Let other threads see it from now on."""
        _depths[self.thread] = self.depth + 1
        self.is_shared = len(_depths) > 1

    def close(self) -> bool:
        """Whether another thread had a window open meanwhile; may be called again."""
        if len(_depths) > 1 or _touch(self.thread) != self.n_changes:
            self.is_shared = True
        if self.rewinds[1] or rewinds.of_others(self.thread) != self.rewinds:
            self.is_rewound = True
        if self.depth:
            _depths[self.thread] = self.depth
        else:
            _depths.pop(self.thread, None)
        return self.is_shared


def run_in_window(function: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
    """Run a layer call that is stored: what it draws may be missing in calls of other threads."""
    window = Window()
    try:
        window.open()
        result = function(*args, **kwargs)
        window.close()
    except BaseException:  # not `finally`: see undo.py
        window.close()
        raise
    return result
