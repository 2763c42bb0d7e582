"""Each error class: kind, text, fields, pickling. And the errors of policies."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.utils.checkpoint

from tests.support import meters
from tests.support.layers import Block, TanhLayer, batch, stack
from tests.support.subject import ENGINE, policy

pytestmark = pytest.mark.skipif(ENGINE != "ckptdeco", reason="errors of ckptdeco")
LABEL = "encoder.layers.3 (Block.forward, model.py:41)"


def examples() -> dict[str, tuple[Exception, str]]:
    from ckptdeco import errors

    before = errors.TensorMeta((8, 128), torch.float32, torch.device("cuda:0"))
    after = errors.TensorMeta((8, 96), torch.float32, torch.device("cuda:0"))
    inplace = "one of the variables needed for gradient computation has been modified by an inplace operation: "
    return {
        "CheckpointError": (errors.CheckpointError("text"), "text"),
        "PolicyError": (
            errors.PolicyError("segment", 0, "must be at least 1", "segment=1"),
            "segment=0: must be at least 1\n  Fix: segment=1",
        ),
        "BudgetError": (
            errors.BudgetError(1000, 1234, (("outside the layers", 1000), ("kept for layer calls", 234))),
            "a budget of 1,000 bytes cannot be met; the least that was found to fit is 1,234 bytes:\n"
            "  1,000  outside the layers\n"
            "    234  kept for layer calls\n"
            "  Fix: budget=1234, or fewer samples in a batch",
        ),
        "RecomputeError": (
            errors.RecomputeError(LABEL, "went wrong", "mend it"),
            f"recomputing {LABEL} went wrong\n  Fix: mend it",
        ),
        "SavedTensorMismatch": (
            errors.SavedTensorMismatch(LABEL, 3, before, after),
            f"recomputing {LABEL} saved a different tensor 3 than forward did\n"
            "  forward:   float32[8, 128] on cuda:0\n"
            "  recompute: float32[8, 96] on cuda:0\n"
            "  Likely cause: the layer reads something that changed since forward (a flag, a global, a counter).\n"
            "  Fix: make the layer depend only on its arguments; policy(..., debug=True) shows the first operation that differs.\n"  # noqa: E501
            "  In the words of torch.utils.checkpoint: Recomputed values for the following tensors have different metadata "  # noqa: E501
            "than during the forward pass.",
        ),
        "ValueMismatch": (
            errors.ValueMismatch(LABEL, "saved tensor 3 (float32[8] on cpu)"),
            f"recomputing {LABEL} gave other values than forward did: saved tensor 3 (float32[8] on cpu)\n"
            "  Fix: make the layer depend only on its arguments; what it read from a global, a closure or an object that "  # noqa: E501
            "changed since forward must be passed to it as an argument.",
        ),
        "RandomnessError": (
            errors.RandomnessError(LABEL),
            f"recomputing {LABEL} drew random numbers, which forward did not\n"
            "  Fix: make the layer draw (or not) by its arguments only, not by something that changed since forward.",
        ),
        **{
            name: (
                getattr(errors, name)(LABEL, "input 0", "do not"),
                f"{inplace}input 0 of {LABEL} was changed between forward and backward\n  Fix: do not",
            )
            for name in ("InputModifiedError", "ParameterModifiedError", "ModifiedTensorError")
        },
        "UncheckpointableError": (
            errors.UncheckpointableError(LABEL, "does what cannot be", "leave it out."),
            f"{LABEL} does what cannot be\n  Fix: leave it out.",
        ),
        "GroupOverlapError": (
            errors.GroupOverlapError(LABEL, 3),
            "Performing two backward calls that overlap is not allowed under torch.utils.checkpoint.GraphExecGroup: "
            f"saved tensor 3 of {LABEL} has served another one\n"
            "  Fix: let each backward of the group go through another part of the graph, or leave the group.",
        ),
        "StaleGraphError": (
            errors.StaleGraphError(LABEL),
            f"backward reached a graph that was built while {LABEL} was recomputed; it ends with the recompute\n"
            "  Fix: do not keep tensors with a graph on the module or in a global from within forward when "
            "ckptdeco.is_recomputing(); return them from forward instead.",
        ),
    }


def names() -> list[str]:
    if ENGINE != "ckptdeco":
        return []
    from ckptdeco import errors

    kinds = [getattr(errors, name) for name in errors.__all__]
    return [kind.__name__ for kind in kinds if issubclass(kind, Exception)]


@pytest.mark.parametrize("name", names())
def test_golden_text(name: str) -> None:
    error, text = examples()[name]
    assert type(error).__name__ == name
    assert str(error) == text


@pytest.mark.parametrize("name", names())
@pytest.mark.parametrize("transport", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy])
def test_survives_pickling_and_copying(name: str, transport: Any) -> None:
    error, text = examples()[name]
    other = transport(error)
    assert type(other) is type(error)
    assert str(other) == text
    assert vars(other) == vars(error)
    assert other.args == error.args


@pytest.mark.parametrize("name", names())
def test_is_a_checkpoint_error_and_a_runtime_error(name: str) -> None:
    error, _ = examples()[name]
    from ckptdeco import CheckpointError

    assert isinstance(error, CheckpointError)
    assert isinstance(error, torch.utils.checkpoint.CheckpointError)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize(
    "options",
    [
        {"segment": 0},
        {"segment": "cube"},
        {"segment": 2.0},
        {"segment": True},
        {"every": 0},
        {"segment": 2, "every": 2},
        {"segment": 2, "levels": 3},
        {"every": 2, "levels": 2},
        {"keep_last": -1},
        {"determinism_check": "sometimes"},
        {"only": 3},
        {"skip": []},
        {"segmnet": 3},
    ],
    ids=str,
)
def test_wrong_arguments_of_a_policy(options: dict[str, Any]) -> None:
    from ckptdeco.errors import PolicyError

    with pytest.raises(PolicyError) as caught:
        policy(**options)
    error = caught.value
    assert error.argument in {**options, "segment": 1, "levels": 1}
    assert repr(error.value) in str(error)
    assert str(error).count("Fix:") == 1
    assert isinstance(error, ValueError)


def test_unknown_option_names_the_nearest() -> None:
    with pytest.raises(ValueError, match="did you mean segment="):
        policy(segmnet=3)


@pytest.mark.parametrize("option", ["only", "skip"])
def test_selection_that_matches_nothing(option: str) -> None:
    """Raised on leaving the block; what was seen is named."""
    from ckptdeco.errors import PolicyError

    model, x = stack(3), batch()
    selector = TanhLayer if option == "only" else lambda layer: True
    with pytest.raises(PolicyError) as caught, policy(segment=1, **{option: selector}):
        model(x).sum().backward()
    text = str(caught.value)
    assert text.startswith(f"{option}=")
    said = {"only": "none of the 3 decorated calls matched", "skip": "all 3 decorated calls were left out"}
    assert said[option] in text
    assert "layers.0" in text
    assert text.count("Fix:") == 1
    assert caught.value.argument == option


def test_selection_that_matches_after_a_backward_in_the_midst_of_forward() -> None:
    from ckptdeco import policy

    model, x = stack(4), batch().requires_grad_()
    with policy(segment=1, only=lambda layer: layer is model.layers[3]):
        y = model.layers[0](x)
        (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        for layer in (model.layers[0], model.layers[1], model.layers[3]):
            y = layer(y)
    (y.sum() + grad.sum()).backward()


def test_selection_that_matches_nothing_is_told_before_a_long_training_is_over() -> None:
    from ckptdeco import policy
    from ckptdeco.errors import PolicyError

    model, n_done = stack(3), 0
    with pytest.raises(PolicyError, match="none of the"), policy(segment=1, only="nothing"):  # noqa: PT012
        for _ in range(10):
            model(batch()).sum().backward()
            n_done += 1
    assert n_done == 2


def test_selection_that_matches_recomputes_only_the_selected() -> None:
    model = stack(4)
    for options, times in (
        ({"only": "*layers.1"}, [1, 2, 1, 1]),
        ({"only": Block}, [2, 2, 2, 2]),
        ({"skip": lambda layer: layer.label in "13"}, [2, 1, 2, 1]),
        ({"only": ("*.0", "*.3")}, [2, 1, 1, 2]),
    ):
        with meters.count_forwards() as counter:
            with policy(segment=1, **options):
                y = model(batch())
            y.sum().backward()
        assert [counter[str(i)] for i in range(4)] == times, options


def test_exception_of_the_block_is_not_replaced_by_the_selection_error() -> None:
    with pytest.raises(KeyError), policy(segment=1, only="nothing"):  # noqa: PT012
        stack(2)(batch())
        raise KeyError
