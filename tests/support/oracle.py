"""The one oracle: a program run plain and under a policy must leave the same bits everywhere."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import random
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils._pytree import tree_flatten_with_path, tree_map_only

Under = Callable[[], Any]
"""Makes the context manager to run a forward in: a policy, or nothing."""

Program = Callable[[nn.Module, Any, Under], Any]
"""program(model, inputs, under) runs forward and backward and returns its outputs."""


@dataclasses.dataclass(frozen=True)
class Observation:
    """All that may be seen after one run of a program; tensors are detached copies."""

    outputs: dict[str, Any]
    input_grads: dict[str, Any]
    parameter_grads: dict[str, Any]
    parameters: dict[str, Any]
    buffers: dict[str, Any]
    torch_rng: torch.Tensor
    python_rng: object
    numpy_rng: tuple[Any, ...]


def seed_everything(seed: int) -> None:
    """Seeds torch, Python's random and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def copy_inputs(inputs: Any) -> Any:
    """Returns the inputs with every tensor a fresh leaf of equal value and requires_grad."""
    return tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), inputs)


def observe(model: nn.Module, inputs: Any, outputs: Any) -> Observation:
    """Returns what a run left behind, in copies."""

    def copied(value: Any) -> Any:
        return value.detach().clone() if isinstance(value, torch.Tensor) else value

    def by_path(tree: Any) -> dict[str, Any]:
        leaves, _ = tree_flatten_with_path(tree)
        return {"".join(str(key) for key in path): copied(leaf) for path, leaf in leaves}

    return Observation(
        outputs=by_path(outputs),
        input_grads=by_path(tree_map_only(torch.Tensor, lambda t: t.grad if t.is_leaf else None, inputs)),
        parameter_grads={name: copied(p.grad) for name, p in model.named_parameters()},
        parameters={name: copied(p) for name, p in model.named_parameters()},
        buffers={name: copied(b) for name, b in model.named_buffers()},
        torch_rng=torch.get_rng_state(),
        python_rng=random.getstate(),
        numpy_rng=numpy.random.get_state(legacy=True),
    )


def assert_equal(expected: Any, actual: Any, what: str) -> None:
    """Asserts bit-for-bit equality (NaN equals NaN; None equals None only)."""
    if isinstance(expected, torch.Tensor) and isinstance(actual, torch.Tensor):
        same_kind = (expected.shape, expected.dtype) == (actual.shape, actual.dtype)
        assert same_kind, f"{what}: {expected.dtype}{list(expected.shape)} but {actual.dtype}{list(actual.shape)}"
        if not torch.equal(expected, actual):
            same = (expected == actual) | ((expected != expected) & (actual != actual))
            if not bool(same.all()):
                largest = (expected - actual).abs().max().item() if expected.dtype != torch.bool else 1
                raise AssertionError(f"{what} differs from the plain run by up to {largest:.3g}")
    elif isinstance(expected, numpy.ndarray):
        assert numpy.array_equal(expected, actual), f"{what} differs from the plain run"
    elif isinstance(expected, dict):
        assert isinstance(actual, dict), f"{what}: {actual!r} is no dict"
        assert expected.keys() == actual.keys(), f"{what}: names {sorted(expected)} but {sorted(actual)}"
        for key in expected:
            assert_equal(expected[key], actual[key], f"{what} {key}")
    elif isinstance(expected, tuple):
        assert isinstance(actual, tuple) and len(expected) == len(actual), f"{what}: {expected!r} but {actual!r}"  # noqa: PT018
        for i, (one, other) in enumerate(zip(expected, actual, strict=True)):
            assert_equal(one, other, f"{what}[{i}]")
    else:
        assert type(expected) is type(actual), f"{what}: {type(expected)} but {type(actual)}"
        assert expected == actual, f"{what}: {expected!r} but {actual!r}"


def assert_same_observation(plain: Observation, other: Observation, where: str = "") -> None:
    """Asserts that two runs left the same bits, the field that differs named."""
    for field in dataclasses.fields(Observation):
        assert_equal(getattr(plain, field.name), getattr(other, field.name), f"{where}{field.name}")


def update(model: nn.Module) -> None:
    """One step of plain gradient descent; gradients are None afterwards."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(parameter.grad, alpha=0.01)
                parameter.grad = None


def assert_same(
    build: Callable[[], nn.Module],
    program: Program,
    make_inputs: Callable[[], Any],
    under: Under,
    *,
    steps: int = 3,
    seed: int = 0,
    between: Callable[[nn.Module], None] = update,
    is_copied: bool = True,
) -> tuple[nn.Module, nn.Module]:
    """Runs the program plain and under a policy for several steps on deep copies and compares all that may be seen.

    The first step under a policy is special (lengths and sizes are unknown), hence several.

    Args:
        build: makes the model.
        program: runs one step.
        make_inputs: makes a step's inputs, a pytree of tensors and anything else.
        under: makes the policy, or returns the same each time.
        steps: how many steps.
        seed: of everything.
        between: called with both models after each comparison.
        is_copied: the second model is a deep copy of the first; False: built again, for what cannot be copied.

    Returns:
        The two models.

    Raises:
        AssertionError: when any bit differs.
    """
    seed_everything(seed)
    plain = build()
    seed_everything(seed)
    checkpointed = copy.deepcopy(plain) if is_copied else build()
    for step in range(steps):
        seed_everything(seed + 1000 + step)
        inputs = make_inputs()
        seen = []
        for model, context in ((plain, contextlib.nullcontext), (checkpointed, under)):
            seed_everything(seed + 1 + step)
            mine = copy_inputs(inputs)
            outputs = program(model, mine, context)
            seen.append(observe(model, mine, outputs))
        assert_same_observation(*seen, where=f"step {step}: ")
        between(plain)
        between(checkpointed)
    return plain, checkpointed


def total(outputs: Any) -> torch.Tensor:
    """A scalar in which every floating output that needs a gradient takes part, each with its own weight."""
    leaves = [t for _, t in tree_flatten_with_path(outputs)[0] if isinstance(t, torch.Tensor) and t.requires_grad]
    loss = torch.zeros(())
    for i, leaf in enumerate(leaves):
        value = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        loss = loss + (value.float().square() * (1 + i)).sum()
    return loss


def forward_backward(model: nn.Module, inputs: Any, under: Under) -> Any:
    """The usual program: forward under the policy, backward outside."""
    with under():
        outputs = model(*inputs)
        loss = total(outputs)
    loss.backward()
    return outputs


def step_inside(model: nn.Module, inputs: Any, under: Under) -> Any:
    """Forward and backward both under the policy."""
    with under():
        outputs = model(*inputs)
        total(outputs).backward()
    return outputs
