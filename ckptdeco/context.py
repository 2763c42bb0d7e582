"""Which policy is active here: a stack of entries in a context variable (R34).

The stack is immutable and linked from the top; an entry that was left is marked dead and skipped, so that `with`
blocks of interleaved generators may end in any order and none comes back to life. Async tasks inherit it as they
inherit every context variable; threads do not, unless they run in `contextvars.copy_context()` or a function that
a policy decorates. The engine never reads it (R7). Start at `active`.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from contextvars import ContextVar
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])

_MAX_NAMES = 5


class Entry:
    """One entered policy, and what happened while it was active.

    Attributes:
        policy: the policy.
        parent: the entry that was active when this one was made, or None.
        alive: False once the policy was left.
        is_on: alive, and not a policy that switches checkpointing off.
        n_seen: decorated calls seen.
        n_matched: those of them that `only=` and `skip=` let through.
        names: up to five names of layers seen.
        unmatched_backward: set by who finds out in backward that nothing matched so far.
        n_unmatched: passes that were over, as far as can be told, without a match.
        is_inside: whether it only tells decorated calls inside a decorated call that `save=` may mean them.
        outer: for decorated calls inside a decorated call, the entry of the policy around it, which counts for both.
        thread: the thread that entered it.
    """

    __slots__ = (
        "alive", "is_inside", "is_on", "n_matched", "n_seen", "n_unmatched", "names", "outer", "parent", "policy",
        "thread", "unmatched_backward",
    )  # fmt: skip

    def __init__(
        self, policy: Any, parent: Entry | None = None, outer: Entry | None = None, *, is_inside: bool = False
    ) -> None:
        self.policy = policy
        self.parent = parent
        self.alive = True
        self.is_on = not policy.is_off
        self.n_seen = 0
        self.n_matched = 0
        self.names: tuple[str, ...] = ()
        self.unmatched_backward = False
        self.n_unmatched = 0
        self.thread = 0
        self.outer = outer
        self.is_inside = is_inside

    @property
    def counting(self) -> Entry:
        """The entry that counts the calls of this one."""
        return self if self.outer is None else self.outer.counting

    def note(self, name: str, *, is_matched: bool) -> None:
        """Counts one decorated call."""
        self.n_seen += 1
        if is_matched:
            self.n_matched += 1
        if len(self.names) < _MAX_NAMES and name not in self.names:
            self.names = (*self.names, name)

    def absorb(self, other: Entry) -> None:
        """Adds the counts of another entry of the same policy, made for another part of the same run."""
        self.n_seen += other.n_seen
        self.n_matched += other.n_matched
        self.names = tuple(dict.fromkeys(self.names + other.names))[:_MAX_NAMES]
        self.unmatched_backward |= other.unmatched_backward

    def __repr__(self) -> str:
        return f"<Entry {self.policy!r}, {'on' if self.is_on else 'off' if self.alive else 'dead'}>"


class _Elsewhere:
    """Which threads have a policy, and how many decorated calls the others ran meanwhile (R34).

    Attributes:
        active: the threads of all entered policies; of one that is entered twice, twice.
        n_missed: decorated calls with grad on threads without a policy, since the first of the entered policies.
    """

    __slots__ = ("active", "n_missed")

    def __init__(self) -> None:
        self.active: list[int] = []
        self.n_missed: dict[int, int] = {}  # by thread: each writes to its own only

    def note(self) -> None:
        """A decorated call sees no policy."""
        thread = threading.get_ident()
        if thread not in self.active:
            self.n_missed[thread] = self.n_missed.get(thread, 0) + 1


elsewhere = _Elsewhere()

_top: ContextVar[Entry | None] = ContextVar("ckptdeco_policy", default=None)


_at_leave: list[Callable[[], None]] = []

#: The entry on top of the stack, dead or alive; None if no policy was ever entered here. One C call.
innermost = _top.get


def _living(entry: Entry | None) -> Entry | None:
    """The entry itself or its nearest ancestor that was not left."""
    while entry is not None and not entry.alive:
        entry = entry.parent
    return entry


def active() -> Entry | None:
    """Returns the innermost living entry, or None if there is none or its policy is off.

    Cost:
        Compute: one read of a context variable and one test, under 150 ns; it is asked at each decorated call.
    """
    entry = _top.get()
    if entry is None or entry.is_on:
        return entry
    entry = _living(entry)
    return entry if entry is not None and entry.is_on else None


def push(policy: Any) -> Entry:
    """Makes `policy` the active one and returns its new entry."""
    entry = Entry(policy, _living(_top.get()))
    try:
        if entry.is_on:
            entry.thread = threading.get_ident()
            if not elsewhere.active:
                elsewhere.n_missed.clear()
            elsewhere.active.append(entry.thread)
        _top.set(entry)
        return entry
    except BaseException:  # an interrupt: it is not entered
        remove(entry)
        raise


def find(policy: Any) -> Entry | None:
    """The topmost living entry of `policy`; None if this context has none."""
    entry = _living(_top.get())
    while entry is not None and entry.policy is not policy:
        entry = _living(entry.parent)
    return entry


def pop(policy: Any) -> Entry | None:
    """Leaves the topmost living entry of `policy` and returns it; None if this context has none."""
    left: list[Entry] = []
    leave(policy, left)
    return left[0] if left else None


def leave(policy: Any, left: list[Entry]) -> None:
    """Leaves the topmost living entry of `policy`, and appends it to `left`; called again, leaves the one there."""
    if not left:
        entry = find(policy)
        if entry is None:
            return
        left.append(entry)
    remove(left[0])


def remove(entry: Entry) -> None:
    """Leaves this entry, wherever it is in the stack."""
    if entry.is_on and entry.thread in elsewhere.active:
        elsewhere.active.remove(entry.thread)
    entry.alive = entry.is_on = False
    _top.set(_living(_top.get()))
    for callback in _at_leave:
        callback()


def at_leave(callback: Callable[[], None]) -> None:
    """Calls `callback` whenever a policy is left."""
    _at_leave.append(callback)


#: Makes an entry the innermost one: inside a decorated call None, which switches policies off, and afterwards the one
#: that was innermost before; it stays dead if it was left meanwhile. One C call, which no interrupt can divide.
replace = _top.set


class Within:
    """A function as it is run in a layer call, first and again: with policies switched off, or a nested one on (R6)."""

    __slots__ = ("entry", "function")

    def __init__(self, function: Callable[..., Any], entry: Entry | None) -> None:
        self.function = function
        self.entry = entry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the function."""
        before = innermost()
        try:
            replace(self.entry)
            result = self.function(*args, **kwargs)
            replace(before)
        except BaseException:  # not `finally`, which an interrupt may skip
            replace(before)
            raise
        return result


# ---- functions that run under a policy


def decorate(function: F, policy: Any, check: Callable[[Entry], None]) -> F:
    """Makes `policy` active whenever `function` runs, whatever the thread.

    A generator has it only while its own code runs, never while it waits for its caller.

    Args:
        function: a function, coroutine function, generator function or async generator function.
        policy: the policy.
        check: gets the entry of a run that ended without an exception; for generators one with the counts of all
            their parts.
    """
    if inspect.isasyncgenfunction(function):
        make = _async_generator
    elif inspect.isgeneratorfunction(function):
        make = _generator
    else:
        make = _coroutine if inspect.iscoroutinefunction(function) else _function
    return cast(F, functools.wraps(function)(make(function, policy, check)))


@contextlib.contextmanager
def _entered(policy: Any, total: Entry) -> Iterator[None]:
    """The policy is active; its counts go to `total`."""
    entry = push(policy)
    try:
        yield
    finally:
        remove(entry)
        total.absorb(entry)


def _function(function: Callable[..., Any], policy: Any, check: Callable[[Entry], None]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        entry = push(policy)
        try:
            result = function(*args, **kwargs)
            remove(entry)
        except BaseException:  # not `finally`, which an interrupt may skip
            remove(entry)
            raise
        check(entry)
        return result

    return run


def _coroutine(function: Callable[..., Any], policy: Any, check: Callable[[Entry], None]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> Any:
        entry = push(policy)
        try:
            result = await function(*args, **kwargs)
            remove(entry)
        except BaseException:  # not `finally`, which an interrupt may skip
            remove(entry)
            raise
        check(entry)
        return result

    return run


def _generator(function: Callable[..., Any], policy: Any, check: Callable[[Entry], None]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        generator = function(*args, **kwargs)
        total = Entry(policy)
        resume, value = generator.send, None
        try:
            while True:
                try:
                    with _entered(policy, total):
                        item = resume(value)
                except StopIteration as stop:
                    result = stop.value
                    break
                try:
                    resume, value = generator.send, (yield item)
                except GeneratorExit:
                    raise
                except BaseException as error:
                    resume, value = generator.throw, error
        finally:
            value = None  # an exception that was thrown in would hold this frame, and this frame it
            with _entered(policy, total):
                generator.close()
        check(total)
        return result

    return run


def _async_generator(function: Callable[..., Any], policy: Any, check: Callable[[Entry], None]) -> Callable[..., Any]:
    async def run(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        generator = function(*args, **kwargs)
        total = Entry(policy)
        resume, value = generator.asend, None
        try:
            while True:
                try:
                    with _entered(policy, total):
                        item = await resume(value)
                except StopAsyncIteration:
                    break
                try:
                    resume, value = generator.asend, (yield item)
                except GeneratorExit:
                    raise
                except BaseException as error:
                    resume, value = generator.athrow, error
        finally:
            value = None
            with _entered(policy, total):
                await generator.aclose()
        check(total)

    return run
