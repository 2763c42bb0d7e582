"""Who watches layer calls while they run, for `ckptdeco.measure`; nobody in training.

One observer for the process. Calls tell it where they are; what it learns is its own affair, and it holds no call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from ckptdeco.errors import PolicyError

if TYPE_CHECKING:
    from ckptdeco.engine.call import Call
    from ckptdeco.engine.dataflow import Chain

__all__ = ["Observer", "observed_by", "observer"]


class Observer(Protocol):
    """What is told of the calls that a schedule drops, on the thread that runs them."""

    def begins(
        self, call: Call, chain: Chain | None, inputs: list[Tensor], pack: Callable[[Tensor], Any]
    ) -> Callable[[Tensor], Any]:
        """The forward is about to run. Returns the hook that packs its saved tensors: `pack`, or one around it."""

    def body_ended(self, call: Call, result: Any) -> None:
        """The forward has run, and nothing is dropped yet."""

    def is_over(self, call: Call) -> None:
        """What the schedule wants dropped is dropped."""

    def recompute_begins(self, call: Call) -> None:
        """Backward needs saved tensors of the call, and it is about to run again."""

    def recompute_ended(self, call: Call) -> None:
        """They are there."""


observer: Observer | None = None


@contextmanager
def observed_by(watcher: Observer) -> Iterator[None]:
    """Have it told of all layer calls.

    Raises:
        PolicyError: there is one already.
    """
    global observer
    if observer is not None:
        raise PolicyError(
            "step", watcher, "another measurement is under way in this process", "measure one step after the other"
        )
    observer = watcher
    try:
        yield
    finally:
        observer = None
