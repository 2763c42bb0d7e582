"""A policy with `save=` is a value as others are, and `explain()` tells what it keeps."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ckptdeco
from ckptdeco.errors import PolicyError
from ckptdeco.integrations.text import policy_from_text
from ckptdeco.policy import policy
from tests.support.inside import Inner, stack_of
from tests.support.layers import DIM


def choose(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
    return torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE


SAVES: dict[str, Any] = {
    "matmuls": "matmuls",
    "glob": "*.inner",
    "class": Inner,
    "function": torch.matmul,
    "functional": F.dropout,
    "method": torch.Tensor.matmul,
    "list": ["matmuls", F.gelu],
    "nested list": ["matmuls", [F.gelu, {"h"}]],
    "any_of": ckptdeco.any_of("matmuls", [F.gelu, "h"], Inner),
    "packet": torch.ops.aten.mm,
    "overload": torch.ops.aten.mm.default,
    "callable": choose,
}


@pytest.mark.parametrize("save", SAVES.values(), ids=SAVES)
def test_policies_are_values(save: Any) -> None:
    made = policy(save=save, segment=2)
    assert made == policy(save=save, segment=2)
    assert hash(made) == hash(policy(save=save, segment=2))
    assert made != policy(segment=2)
    assert made != policy(save="something else", segment=2)
    assert repr(made).startswith("policy(segment=2, save=")
    assert copy.deepcopy(made) == made
    assert copy.copy(made) == made


@pytest.mark.parametrize("name", [name for name in SAVES if name not in ("packet", "overload")])
def test_policies_are_pickled_also_after_use(name: str) -> None:
    made = policy(save=SAVES[name])
    for _ in range(2):
        again = pickle.loads(pickle.dumps(made))
        assert again == made
        with again:
            out = stack_of(lambda s, x: s.one(x).sin())(torch.ones(2, DIM))
        out.sum().backward()
        with made:
            stack_of(lambda s, x: s.one(x).sin())(torch.ones(2, DIM))


def test_lists_and_single_choices_are_equal_to_what_they_mean() -> None:
    assert policy(save=["a", "b"]) == policy(save=("a", "b"))
    assert policy(save={"a", "b"}) == policy(save=frozenset(("b", "a")))


def test_policies_read_as_they_were_written() -> None:
    assert repr(policy(save="matmuls")) == "policy(segment=1, save='matmuls')"
    assert repr(policy(save=[F.dropout, Inner, "h"])) == "policy(segment=1, save=(dropout, Inner, 'h'))"


def test_policies_from_text() -> None:
    assert policy_from_text("save=matmuls, segment=2") == policy(segment=2, save="matmuls")
    assert policy_from_text("policy(segment=2, save='*.inner')") == policy(segment=2, save="*.inner")


WRONG = [3, [], ["a", 3.5], [torch.ops.aten.mm, "matmuls"], [choose, choose], {"a": 1}]


@pytest.mark.parametrize("save", WRONG, ids=["number", "nothing", "a number", "mixed", "two callables", "dict"])
def test_what_cannot_be_saved_is_an_error(save: Any) -> None:
    with pytest.raises(PolicyError) as caught:
        policy(save=save)
    assert caught.value.argument == "save"


def test_explain_tells_what_is_kept() -> None:
    """Of `gelu(one(x))` and `two`: the input, the result of `one`; not the result of `two`, which nobody needs."""
    model, x = stack_of(lambda s, x: s.two(F.gelu(s.one(x)))), torch.randn(4, DIM)
    n_bytes = 4 * DIM * 4
    for _ in range(3):
        with policy(save="matmuls"):
            out = model(x)
        calls = ckptdeco.explain().calls
        assert [call.kept_bytes for call in calls] == [2 * n_bytes] * 3
        assert [call.dropped_bytes for call in calls] == [2 * n_bytes] * 3  # the input and the result of gelu
        out.sum().backward()
    with policy():
        model(x)
    assert [call.dropped_bytes for call in ckptdeco.explain().calls] == [3 * n_bytes] * 3


def test_name_without_a_policy_gives_the_value_itself() -> None:
    x = torch.ones(2)
    assert ckptdeco.checkpoint_name(x, "h") is x
