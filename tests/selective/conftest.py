"""`save=` under several schedules: what is kept of a call is used whenever it is run again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.layers import batch
from tests.support.oracle import Program, assert_same, forward_backward
from tests.support.subject import ENGINE, policy

SCHEDULES: dict[str, dict[str, Any]] = {
    "segment=1": {"segment": 1},
    "segment=3": {"segment": 3},
    "log": {"levels": "log"},
}
MORE: dict[str, dict[str, Any]] = {
    **SCHEDULES,
    "every=2": {"every": 2},
    "levels=2": {"segment": 3, "levels": 2},
    "keep_last": {"segment": 2, "keep_last": 1},
    "no early stop": {"segment": 3, "early_stop": False},
    "values": {"segment": 2, "determinism_check": "values"},
}
Exact = Callable[..., None]
"""exact(save, build, program=forward_backward, make_inputs=…): asserts that some steps are those of the plain run."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The stand-ins have no `save=`."""
    if ENGINE != "ckptdeco":
        for item in items:
            if "selective" in item.path.parts:
                item.add_marker(pytest.mark.skip(reason="the stand-ins have no save="))


def _exact(schedules: dict[str, dict[str, Any]]) -> Exact:
    """One test for all schedules: after each test the garbage of the process is collected, which takes longer."""

    def check(
        save: Any,
        build: Any,
        program: Program = forward_backward,
        make_inputs: Callable[[], Any] = lambda: (batch(),),
        **more: Any,
    ) -> None:
        for name, options in schedules.items():
            made = policy(save=save, **options)
            try:
                assert_same(build, program, make_inputs, lambda made=made: made, **{"steps": 3, **more})
            except Exception as error:
                raise AssertionError(f"under {name}: {type(error).__name__}: {error}") from error

    return check


@pytest.fixture
def exact() -> Exact:
    """Under three schedules."""
    return _exact(SCHEDULES)


@pytest.fixture
def exact_in_all() -> Exact:
    """Under all schedules."""
    return _exact(MORE)
