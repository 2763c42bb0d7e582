"""A function that runs in the user's contexts: one around forward, one around each recompute (`context_fn`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ckptdeco.engine.running import running
from ckptdeco.errors import PolicyError

__all__ = ["ContextFn", "InContexts"]

ContextFn = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]


class InContexts:
    """Runs a function in one context manager in forward, in another in a recompute."""

    __slots__ = ("context_fn", "forward", "function", "recompute")

    def __init__(self, function: Callable[..., Any], context_fn: ContextFn) -> None:
        self.function = function
        self.context_fn = context_fn
        self.forward, self.recompute = context_fn()

    def anew(self) -> InContexts:
        """The same in contexts that nothing has run in, as forward was.

        A recompute may have used up what its context holds: torch's selective checkpointing hands a stored result out
        once.
        """
        fresh = InContexts(self.function, self.context_fn)
        fresh.recompute = fresh.forward
        return fresh

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it in the context of this pass.

        Raises:
            PolicyError: the forward context swallowed an exception, so there is nothing to return.
        """
        frame = running.frame
        is_again = frame is not None and frame.again
        is_done, result = False, None
        with self.recompute if is_again else self.forward:
            result = self.function(*args, **kwargs)
            is_done = True
        if not is_done and not is_again:
            raise PolicyError(
                "context_fn",
                self.context_fn,
                "its forward context suppressed an exception raised during the checkpointed forward",
                "let exceptions pass through the context, and catch them around the call",
            )
        return result
