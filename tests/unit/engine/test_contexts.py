"""A function runs in the first context in forward and in the second in a recompute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from ckptdeco.engine.contexts import InContexts
from ckptdeco.engine.running import Frame, running
from ckptdeco.errors import PolicyError


class Contexts:
    """Makes pairs and logs what is entered: the number of the pair and the pass."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.n = 0

    def __call__(self) -> Any:
        self.n += 1
        return self.entered(f"forward {self.n}"), self.entered(f"recompute {self.n}")

    @contextlib.contextmanager
    def entered(self, name: str) -> Iterator[None]:
        self.log.append(name)
        yield


def call(body: InContexts, again: bool) -> Any:
    before = running.frame
    running.frame = Frame([], again=again)
    try:
        return body(3)
    finally:
        running.frame = before


def test_each_pass_has_its_context() -> None:
    contexts = Contexts()
    body = InContexts(lambda x: x + 1, contexts)
    assert contexts.log == []
    assert call(body, again=False) == 4
    assert call(body, again=True) == 4
    assert contexts.log == ["forward 1", "recompute 1"]


def test_anew_runs_as_forward_did_in_a_context_that_nothing_ran_in() -> None:
    contexts = Contexts()
    body = InContexts(lambda x: x + 1, contexts)
    assert call(body.anew(), again=True) == 4
    assert contexts.log == ["forward 2"]


def test_forward_context_that_swallows_an_exception_is_refused() -> None:
    def fails(x: int) -> int:
        raise KeyError(x)

    body = InContexts(fails, lambda: (contextlib.suppress(KeyError), contextlib.suppress(KeyError)))
    with pytest.raises(PolicyError, match="suppressed an exception"):
        call(body, again=False)
    assert call(body, again=True) is None  # a recompute that saved too little is found by what it saved
