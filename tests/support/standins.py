"""Two subjects with ckptdeco's surface that prove the oracle: nothing is checkpointed, or every layer by torch.

Both ignore what the policy says beyond on and off. Select one with the environment variable
CKPTDECO_TEST_ENGINE=none or =torch; the programs that fail
under `torch` show where per-layer checkpointing by hand is inexact.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint

_active: contextvars.ContextVar[tuple[bool, ...]] = contextvars.ContextVar("active", default=())
_inside: contextvars.ContextVar[bool] = contextvars.ContextVar("inside", default=False)


class StandInPolicy:
    """On or off; usable as context manager (re-entrant) and as decorator, as `ckptdeco.Policy` is."""

    def __init__(self, is_on: bool) -> None:
        self.is_on = is_on

    def __enter__(self) -> StandInPolicy:
        _active.set((*_active.get(), self.is_on))
        return self

    def __exit__(self, *exc: object) -> None:
        _active.set(_active.get()[:-1])

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if inspect.isgeneratorfunction(function):

            @functools.wraps(function)
            def generate(*args: Any, **kwargs: Any) -> Iterator[Any]:
                inner = function(*args, **kwargs)
                while True:
                    try:
                        with self:
                            item = next(inner)
                    except StopIteration as stop:
                        return stop.value
                    yield item

            return generate

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return call


def policy(*args: Any, **options: Any) -> StandInPolicy:
    """A policy that is off for `policy(None)` and on for all others."""
    return StandInPolicy(is_on=not (args and args[0] is None))


def plain_checkpointable(function: Any = None, *, name: str | None = None) -> Any:
    """Returns the function as it is."""
    return (lambda f: f) if function is None else function


def torch_checkpointable(function: Any = None, *, name: str | None = None) -> Any:
    """torch.utils.checkpoint around each outermost call while a policy is on."""
    if function is None:
        return torch_checkpointable

    @functools.wraps(function)
    def forward(*args: Any, **kwargs: Any) -> Any:
        is_on = _active.get()[-1:] == (True,)
        if not is_on or _inside.get() or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        token = _inside.set(True)
        try:
            return torch_checkpoint(function, *args, use_reentrant=False, **kwargs)
        finally:
            _inside.reset(token)

    return forward


@contextlib.contextmanager
def nothing() -> Iterator[None]:
    """A policy that does nothing, for the plain run."""
    yield
