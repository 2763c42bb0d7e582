"""Each program runs under three policies: one that compares no values, the usual one, one that compares all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.layers import batch
from tests.support.oracle import Program, assert_same, copy_inputs, forward_backward, seed_everything
from tests.support.subject import ENGINE, PolicySpec, spec

POLICIES = (
    spec(segment=4, determinism_check="none"),  # what is exact here is so without a look at values
    spec(segment=2),
    spec(segment=3, levels=2, early_stop=False, determinism_check="values"),
)
LOUD_POLICIES = tuple(spec for spec in POLICIES if dict(spec.options).get("determinism_check") != "none")
if ENGINE != "ckptdeco":
    POLICIES = POLICIES[:1]  # a stand-in does not read the options

Exact = Callable[..., None]
Loud = Callable[..., None]


@pytest.fixture(params=POLICIES, ids=str)
def under(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """The folder's policies, one after the other."""
    spec: PolicySpec = request.param
    return spec.under()


@pytest.fixture
def exact(under: Callable[[], Any]) -> Exact:
    """exact(build, program, make_inputs): four steps leave the bits of the plain run."""

    def check(build: Any, program: Program = forward_backward, make_inputs: Any = None, steps: int = 4) -> None:
        assert_same(build, program, make_inputs or (lambda: (batch(),)), under, steps=steps)

    return check


def assert_loud(kind: type[Exception], says: str, build: Any, program: Program, make_inputs: Any, under: Any) -> None:
    """The plain run is legal, and the policy's raises this error, with these words, in its first step."""
    if ENGINE != "ckptdeco":
        pytest.skip("the errors are ckptdeco's")
    seed_everything(0)
    inputs = make_inputs() if make_inputs else (batch(),)
    program(build(), copy_inputs(inputs), contextlib.nullcontext)
    with pytest.raises(kind) as caught:
        program(build(), copy_inputs(inputs), under)
    assert says in str(caught.value), str(caught.value)


@pytest.fixture
def loud(under: Callable[[], Any]) -> Loud:
    """loud(kind, says, build, program): where exactness cannot be had, this error is raised under every policy."""

    def check(kind: Any, says: str, build: Any, program: Program, make_inputs: Any = None) -> None:
        assert_loud(kind, says, build, program, make_inputs, under)

    return check


@pytest.fixture(params=LOUD_POLICIES, ids=str)
def exact_with_values(request: pytest.FixtureRequest) -> Exact:
    """The same as `exact`, under the policies that compare values."""
    spec: PolicySpec = request.param
    made = spec.make()

    def check(build: Any, program: Program = forward_backward, make_inputs: Any = None, steps: int = 4) -> None:
        assert_same(build, program, make_inputs or (lambda: (batch(),)), lambda: made, steps=steps)

    return check


@pytest.fixture(params=LOUD_POLICIES, ids=str)
def loud_by_value(request: pytest.FixtureRequest) -> Loud:
    """The same, under the policies that compare values."""
    spec: PolicySpec = request.param
    made = spec.make()

    def check(kind: Any, says: str, build: Any, program: Program, make_inputs: Any = None) -> None:
        assert_loud(kind, says, build, program, make_inputs, lambda: made)

    return check
