"""Random programs times random policies: every gradient, buffer and RNG state is that of the plain run."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import hypothesis
import pytest

from tests.support.oracle import Observation, assert_same
from tests.support.programs import Call, Glue, Hold, RandomProgram, Skip, policies, programs, run
from tests.support.subject import PolicySpec, spec


def assert_exact(program: RandomProgram, policy: PolicySpec) -> None:
    """A program that the plain run refuses (a tensor changed in place) proves nothing and is left out."""
    try:
        assert_same(program.build, run, program.make_inputs, contextlib.nullcontext, steps=1)
    except RuntimeError as error:
        hypothesis.assume("inplace operation" not in str(error) and "in-place operation" not in str(error))
        raise
    made = policy.make()
    assert_same(program.build, run, program.make_inputs, lambda: made)


@hypothesis.given(programs(), policies())
@hypothesis.settings(max_examples=hypothesis.settings().max_examples * 5)
def test_random_programs_are_exact(program: RandomProgram, policy: PolicySpec) -> None:
    assert_exact(program, policy)


@hypothesis.given(programs(max_calls=30), policies())
def test_longer_random_programs_are_exact(program: RandomProgram, policy: PolicySpec) -> None:
    assert_exact(program, policy)


@hypothesis.given(programs(), policies(nested=True))
def test_random_programs_are_exact_with_nested(program: RandomProgram, policy: PolicySpec) -> None:
    assert_exact(program, policy)


@hypothesis.given(programs(), policies(), policies())
def test_policies_may_change_from_step_to_step(program: RandomProgram, one: PolicySpec, two: PolicySpec) -> None:
    try:
        assert_same(program.build, run, program.make_inputs, contextlib.nullcontext, steps=1)
    except RuntimeError:
        hypothesis.reject()
    made = itertools.cycle([one.make(), two.make()])
    assert_same(program.build, run, program.make_inputs, lambda: next(made), steps=4)


def test_the_property_can_fail() -> None:
    """A program that looks whether it is checkpointed is noticed."""
    program = RandomProgram(
        ("block", "dropout"), (Call(0, 0), Call(0, 1), Glue(0, "scale"), Skip(0, 2), Hold(0)), "after"
    )
    under = spec(segment=2).make

    def spoiled(model: Any, inputs: Any, context: Any) -> Any:
        out = run(model, inputs, context)
        if context is under:
            model.layers[1].up.weight.grad.view(-1)[0] += 1e-6
        return out

    with pytest.raises(AssertionError, match="parameter_grads"):
        assert_same(program.build, spoiled, program.make_inputs, under)
    assert Observation.__dataclass_fields__.keys() >= {"outputs", "parameter_grads", "buffers", "torch_rng"}
