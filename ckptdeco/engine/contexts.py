"""A function that runs in the user's contexts: one around forward, one around each recompute (`context_fn`)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from ckptdeco.engine.running import running
from ckptdeco.engine.torch_private import TorchDispatchMode
from ckptdeco.errors import PolicyError

__all__ = ["ContextFn", "InContexts", "InSelective", "Only"]

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


class InSelective(InContexts):
    """Runs a function in contexts of torch's selective checkpointing, any number of times.

    Torch hands a stored result out once. Here a call may be run again more often: for later calls of its segment, and
    for a second backward.
    """

    __slots__ = ("stored",)

    def __init__(self, function: Callable[..., Any], context_fn: ContextFn) -> None:
        super().__init__(function, context_fn)
        self.stored: dict[Any, Any] | None = None  # what the contexts hold once forward is over

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it with all that forward stored."""
        storage = getattr(self.recompute, "storage", {})
        if self.stored is not None:
            storage.update({key: dict(entries) for key, entries in self.stored.items()})
        result = super().__call__(*args, **kwargs)
        if self.stored is None:
            self.stored = {key: dict(entries) for key, entries in storage.items()}
        return result


class Only(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """What torch's selective checkpointing does in a recompute, for some operators; all others just run.

    Torch counts the calls of every operator, and wants as many in the recompute. But of casts under autocast there may
    be more, where an earlier call of forward left the cast of a weight in the cache.
    """

    def __init__(self, mode: Any, operators: set[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.mode = mode
        self.operators = operators  # which may be told as forward goes on

    @property
    def storage(self) -> dict[Any, Any]:
        """What forward stored."""
        stored: dict[Any, Any] = self.mode.storage
        return stored

    def __enter__(self) -> Any:
        getattr(self.mode, "func_counter", {}).clear()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.operators:
            return self.mode.__torch_dispatch__(func, types, args, kwargs or {})
        return func(*args, **(kwargs or {}))
