"""Putting things back, whatever happens meanwhile: also if an interrupt comes in the middle of it.

Whoever changes something that outlives the call at hand first registers what brings it back, then changes it. Each
action may be run twice and sets what was read before. So the one pattern for all of the engine is safe at every line:

    undo = Undo()
    try:
        ...
        undo.run()
    except BaseException:
        undo.insist()
        raise

A `finally` would not do: it may itself be interrupted at its first step.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["Undo"]


class Undo(list[Callable[[], object]]):
    """What brings back the state before, first change first."""

    def run(self) -> None:
        """Run the actions, the last one first. One that is interrupted stays, to be run again."""
        while self:
            self[-1]()
            self.pop()

    def insist(self) -> None:
        """The same after a failure: one action that fails does not keep the others from running."""
        failed: BaseException | None = None
        while self:
            try:
                self.pop()()
            except BaseException as error:
                failed = error
        if failed is not None:
            raise failed
