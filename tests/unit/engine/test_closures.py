"""Closures: a recompute sees what the variables held when forward ran."""

from __future__ import annotations

import functools
from typing import Any

from ckptdeco.engine.closures import rerunnable
from ckptdeco.engine.running import Frame, running


def again(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call it as a recompute does."""
    outer = running.frame
    running.frame = Frame([], again=True)
    try:
        return function(*args, **kwargs)
    finally:
        running.frame = outer


def test_recompute_sees_the_variables_of_forward() -> None:
    value = 1
    frozen = rerunnable(lambda: value)
    value = 2
    assert frozen() == 2  # forward is the function itself
    assert again(frozen) == 1


def test_loop_variable_is_that_of_its_turn() -> None:
    made = [rerunnable(lambda: i) for i in range(3)]  # noqa: B023
    assert [again(function) for function in made] == [0, 1, 2]


def test_what_one_recompute_writes_the_next_does_not_see() -> None:
    n = 0

    def count() -> int:
        nonlocal n
        n += 1
        return n

    frozen = rerunnable(count)
    assert [again(frozen), again(frozen)] == [1, 1]
    assert n == 0
    assert frozen() == 1
    assert n == 1


def test_object_that_is_changed_in_place_is_seen_changed() -> None:
    """A documented limit: values are kept as they are."""
    values = [1]
    frozen = rerunnable(lambda: values[0])
    values[0] = 2
    assert again(frozen) == 2


def test_function_in_a_partial_is_frozen() -> None:
    value = 1
    frozen = rerunnable(functools.partial(lambda a, b: (a, b, value), 5, b=6))
    value = 2
    assert again(frozen) == (5, 6, 1)
    assert frozen() == (5, 6, 2)


def test_defaults_and_attributes_of_the_function_are_copied() -> None:
    value = 1

    def function(a: int = 3, *, b: int = 4) -> Any:
        return a, b, value

    frozen = rerunnable(function)
    value = 2
    assert again(frozen) == (3, 4, 1)


def test_what_has_no_closure_is_returned_as_it_is() -> None:
    def plain() -> int:
        return 1

    class Callable_:
        def __call__(self) -> int:
            return 1

    thing = Callable_()
    assert rerunnable(plain) is plain
    assert rerunnable(thing) is thing
    assert rerunnable(thing.__call__) == thing.__call__
    part = functools.partial(plain)
    assert rerunnable(part) is part


def test_variable_without_a_value_yet_leaves_the_function_as_it_is() -> None:
    def function() -> Any:
        return later

    assert rerunnable(function) is function
    later = 1
    assert function() == 1
