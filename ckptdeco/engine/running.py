"""What runs on this thread right now: the innermost layer call (a frame), and whether it is a recompute."""

from __future__ import annotations

import itertools
import threading
from typing import Any

__all__ = ["Frame", "is_recomputing", "running"]


_numbers = itertools.count()


class Frame:
    """One run of a layer call's forward, first or again.

    Layer calls nested in it get their decisions recorded and, in a recompute, given again, so that both runs save the
    same tensors (R22).
    """

    __slots__ = ("__weakref__", "again", "collector", "decisions", "n_nested", "number")

    def __init__(self, decisions: list[object], again: bool, collector: Any = None) -> None:
        self.number = next(_numbers)  # tells frames apart, where an address may be used again
        self.decisions = decisions
        self.again = again
        self.n_nested = 0
        self.collector = collector  # whose hooks the saved tensors go through


class _Running(threading.local):
    frame: Frame | None = None
    recomputing: bool = False
    selection: Any = None  # sees the operations of the layer call (`save=`)
    listener: Any = None  # hears the forward hooks of modules inside the layer call

    def set(self, frame: Frame | None, recomputing: bool) -> None:
        """Say what runs from now on."""
        self.frame, self.recomputing = frame, recomputing


running = _Running()


def is_recomputing() -> bool:
    """Tell whether the code that asks is being run again for backward.

    Use it to skip side effects that must happen once a step, such as logging or counting tokens.

    Returns:
        True inside a layer's forward while ckptdeco recomputes it (on this thread), else False.

    Example:
        >>> import ckptdeco
        >>> ckptdeco.is_recomputing()
        False
    """
    return running.recomputing
