"""Every error that ckptdeco raises: what happened, expected and actual, where, one fix.

All are `torch.utils.checkpoint.CheckpointError`, so code that catches torch's error catches ours. Fields go to the
base class's ``args`` and the text is built in ``__str__``: an error survives pickling between processes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointError as _TorchCheckpointError

__all__ = [
    "BudgetError",
    "CheckpointError",
    "GroupOverlapError",
    "InputModifiedError",
    "ModifiedTensorError",
    "ParameterModifiedError",
    "PolicyError",
    "RandomnessError",
    "RecomputeError",
    "SavedTensorMismatch",
    "StaleGraphError",
    "TensorMeta",
    "UncheckpointableError",
    "ValueMismatch",
]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """What is compared of a saved tensor between forward and recompute; prints as ``float32[8, 128] on cuda:0``."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorMeta:
        """The metadata of one tensor."""
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device)

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}{list(self.shape)} on {self.device}"


class CheckpointError(_TorchCheckpointError):
    """Base of every ckptdeco error; also a `torch.utils.checkpoint.CheckpointError` (a `RuntimeError`)."""


class PolicyError(CheckpointError, ValueError):
    """An argument of ckptdeco's own API cannot be used.

    Args:
        argument: name of the argument, as the user writes it.
        value: what was passed.
        problem: why that cannot work.
        fix: what to write instead.
    """

    def __init__(self, argument: str, value: object, problem: str, fix: str) -> None:
        super().__init__(argument, value, problem, fix)
        self.argument = argument
        self.value = value
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.argument}={self.value!r}: {self.problem}\n  Fix: {self.fix}"


class BudgetError(CheckpointError, ValueError):
    """No schedule fits into the budget.

    Args:
        budget_bytes: what was asked for.
        least_bytes: the least with which a schedule was found.
        parts: what these are made of, name and bytes.
    """

    def __init__(self, budget_bytes: int, least_bytes: int, parts: tuple[tuple[str, int], ...]) -> None:
        super().__init__(budget_bytes, least_bytes, parts)
        self.budget_bytes = budget_bytes
        self.least_bytes = least_bytes
        self.parts = parts

    def __str__(self) -> str:
        lines = [
            f"a budget of {self.budget_bytes:,} bytes cannot be met; the least that was found to fit is "
            f"{self.least_bytes:,} bytes:",
            *(f"  {n_bytes:>{len(f'{self.least_bytes:,}')},}  {name}" for name, n_bytes in self.parts),
            f"  Fix: budget={self.least_bytes}, or fewer samples in a batch",
        ]
        return "\n".join(lines)


class RecomputeError(CheckpointError):
    """A layer call could not be recomputed as it ran in forward.

    Args:
        layer: label of the layer, ``encoder.layers.3 (Block.forward, model.py:41)``.
        problem: what happened, as the end of the sentence that the label begins.
        fix: one suggestion.
    """

    def __init__(self, layer: str, problem: str, fix: str, *details: Any) -> None:
        super().__init__(layer, problem, fix, *details)
        self.layer = layer
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"recomputing {self.layer} {self.problem}\n  Fix: {self.fix}"


class SavedTensorMismatch(RecomputeError):
    """The recompute saved other tensors than forward did: another number, or one of other shape, dtype or device.

    Args:
        layer: label of the layer.
        index: position of the tensor among those the layer saved, or None when only their number differs.
        forward: `TensorMeta` in forward, or the number of tensors saved.
        recompute: the same in the recompute; None when the tensor was not saved at all.
        fix: one suggestion.
        trace: the operators of both runs around the first difference (``debug=True``), or "".
    """

    def __init__(
        self,
        layer: str,
        index: int | None,
        forward: TensorMeta | int,
        recompute: TensorMeta | int | None,
        fix: str = "make the layer depend only on its arguments; policy(..., debug=True) shows the first operation "
        "that differs.",
        trace: str = "",
    ) -> None:
        problem = "saved another number of tensors than forward did"
        if index is not None:
            problem = f"saved a different tensor {index} than forward did"
        super().__init__(layer, problem, fix)
        self.args = (layer, index, forward, recompute, fix, trace)
        self.index = index
        self.forward = forward
        self.recompute = recompute
        self.trace = trace

    def __str__(self) -> str:
        unit = " tensors" if self.index is None else ""
        lines = [
            f"recomputing {self.layer} {self.problem}",
            f"  forward:   {self.forward}{unit}",
            f"  recompute: {'nothing' if self.recompute is None else f'{self.recompute}{unit}'}",
        ]
        if self.trace:
            lines.append(self.trace)
        lines.append(
            "  Likely cause: the layer reads something that changed since forward (a flag, a global, a counter)."
        )
        lines.append(f"  Fix: {self.fix}")
        lines.append(f"  In the words of torch.utils.checkpoint: {self._in_words_of_torch()}")
        return "\n".join(lines)

    def _in_words_of_torch(self) -> str:
        """So that users (and tests) who know torch's errors find them."""
        if isinstance(self.forward, int) and isinstance(self.recompute, int) and self.recompute > self.forward:
            words = "trying to save more tensors during recomputation than during the original forward pass."
        elif not isinstance(self.recompute, TensorMeta):
            words = "A different number of tensors was saved during the original forward and recomputation."
        else:
            words = "Recomputed values for the following tensors have different metadata than during the forward pass."
        if self.trace:
            words += " You are seeing this error because you passed `debug=True` to checkpoint."
        return words


class ValueMismatch(RecomputeError):
    """The recompute saved a tensor of the same shape but with other values (first recompute, or "values" check).

    Args:
        layer: label of the layer.
        what: which tensor, e.g. ``saved tensor 3 (float32[8, 128] on cpu)``.
    """

    def __init__(self, layer: str, what: str) -> None:
        super().__init__(
            layer,
            f"gave other values than forward did: {what}",
            "make the layer depend only on its arguments; what it read from a global, a closure or an object that "
            "changed since forward must be passed to it as an argument.",
        )
        self.args = (layer, what)
        self.what = what


class RandomnessError(RecomputeError):
    """A recompute drew random numbers although no call in it drew any in forward.

    Args:
        layers: labels of the layer calls that were recomputed.
    """

    def __init__(self, layers: str) -> None:
        super().__init__(
            layers,
            "drew random numbers, which forward did not",
            "make the layer draw (or not) by its arguments only, not by something that changed since forward.",
        )
        self.args = (layers,)
        self.layers = layers


class UncheckpointableError(CheckpointError):
    """A layer does something in forward that excludes checkpointing it; raised at that forward.

    Args:
        layer: label of the layer.
        problem: what it does, as the end of the sentence that the label begins.
        fix: one suggestion.
    """

    def __init__(self, layer: str, problem: str, fix: str) -> None:
        super().__init__(layer, problem, fix)
        self.layer = layer
        self.problem = problem
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.layer} {self.problem}\n  Fix: {self.fix}"


class _Modified(CheckpointError):
    """Something that the recompute or backward needs was changed in place before backward."""

    def __init__(self, layer: str, what: str, fix: str) -> None:
        super().__init__(layer, what, fix)
        self.layer = layer
        self.what = what
        self.fix = fix

    def __str__(self) -> str:
        # Autograd's own words come first, so that users (and tests) who know that error find it.
        return (
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{self.what} of {self.layer} was changed between forward and backward\n  Fix: {self.fix}"
        )


class InputModifiedError(_Modified):
    """A kept input of a layer call was changed in place between forward and backward."""


class ParameterModifiedError(_Modified):
    """A parameter or buffer of a layer was changed between its forward and its recompute."""


class ModifiedTensorError(_Modified):
    """A tensor saved for backward was changed in place after it was saved (as autograd itself reports it)."""


class GroupOverlapError(CheckpointError):
    """Two backward passes under one `torch.utils.checkpoint.GraphExecGroup` asked for the same saved tensor.

    Args:
        layer: label of the layer.
        index: position of the tensor among those the layer saved.
    """

    def __init__(self, layer: str, index: int) -> None:
        super().__init__(layer, index)
        self.layer = layer
        self.index = index

    def __str__(self) -> str:
        return (
            "Performing two backward calls that overlap is not allowed under torch.utils.checkpoint.GraphExecGroup: "
            f"saved tensor {self.index} of {self.layer} has served another one\n"
            "  Fix: let each backward of the group go through another part of the graph, or leave the group."
        )


class StaleGraphError(CheckpointError):
    """A graph that was built during a recompute was used after it; its saved tensors are gone.

    Args:
        layer: label of the layer whose recompute built the graph.
    """

    def __init__(self, layer: str) -> None:
        super().__init__(layer)
        self.layer = layer

    def __str__(self) -> str:
        return (
            f"backward reached a graph that was built while {self.layer} was recomputed; it ends with the recompute\n"
            "  Fix: do not keep tensors with a graph on the module or in a global from within forward when "
            "ckptdeco.is_recomputing(); return them from forward instead."
        )
