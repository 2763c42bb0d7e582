"""Each habit under four policies, seven calls of a layer each, begun at its first call or at a later one.

The engine compares values at the 1st, 2nd, 4th, 8th call of a layer. A habit that begins at the 3rd or 5th call has
to be exact where nothing is compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.layers import batch
from tests.support.oracle import Program, assert_same, forward_backward
from tests.support.subject import ENGINE, PolicySpec, spec

N_STEPS = 7
POLICIES = (spec(segment=1), spec(segment=2), spec(segment=3, early_stop=False), spec(levels="log"))
BEGINNINGS = (
    (spec(segment=1), 3),
    (spec(segment=2), 1),
    (spec(segment=3, early_stop=False), 5),
    (spec(levels="log"), 3),
)
"""A policy and the call of a layer, counted from 1, at which its habit begins."""
if ENGINE != "ckptdeco":
    POLICIES, BEGINNINGS = POLICIES[:1], BEGINNINGS[:1]  # a stand-in does not read the options

SCHEDULES = (
    spec(segment=1),
    spec(segment=3),
    spec(every=2),
    spec(segment=4, levels=2),
    spec(levels="log"),
)
if ENGINE != "ckptdeco":
    SCHEDULES = SCHEDULES[:1]
N_FEW = 4

Exact = Callable[..., None]
"""exact(build, program=forward_backward, more=None): asserts that seven steps are those of the plain run."""


@pytest.fixture(params=POLICIES, ids=str)
def under(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """The folder's policies, one after the other."""
    spec: PolicySpec = request.param
    return spec.under()


@pytest.fixture
def exact(under: Callable[[], Any]) -> Exact:
    """A step's inputs are a batch."""

    def check(build: Any, program: Program = forward_backward, make_inputs: Any = lambda: (batch(),)) -> None:
        assert_same(build, program, make_inputs, under, steps=N_STEPS)

    return check


@pytest.fixture(params=BEGINNINGS, ids=lambda pair: f"{pair[0]}-from_call_{pair[1]}")
def exact_from(request: pytest.FixtureRequest) -> Exact:
    """A step's inputs are a batch and whether the habit has begun."""
    made, first_call = request.param[0].make(), request.param[1]

    def check(build: Any, program: Program = forward_backward) -> None:
        calls = itertools.count(1)

        def make_inputs() -> tuple[torch.Tensor, bool]:
            return batch(), next(calls) >= first_call

        assert_same(build, program, make_inputs, lambda: made, steps=N_STEPS)

    return check


@pytest.fixture(params=SCHEDULES, ids=str)
def scheduled(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Returns the same policy each time, of those that differ in what is kept and in how often calls are run again."""
    return request.param.under()


@pytest.fixture
def same(scheduled: Callable[[], Any]) -> Exact:
    """same(build, program, make_inputs): asserts that a few steps are those of the plain run; inputs are a batch."""

    def check(
        build: Any, program: Program = forward_backward, make_inputs: Any = lambda: (batch(),), **more: Any
    ) -> None:
        assert_same(build, program, make_inputs, scheduled, **{"steps": N_FEW, **more})

    return check
