"""`save=`: which results inside a recomputed layer stay, so that what is expensive is not run again.

Start at `selects`, which reads what the user gave. How it works is in `engine/selection.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ckptdeco.engine.contexts import ContextFn, Only
from ckptdeco.engine.running import running
from ckptdeco.engine.selection import Selects
from ckptdeco.errors import PolicyError

__all__ = ["Chosen", "Save", "any_of", "checkpoint_name", "hashable", "selects"]

Save: TypeAlias = Any  # "matmuls", a name or glob, a class, a function of torch, an operator, a callable, any_of(…)

_NAMES = (
    "linear", "bilinear", "matmul", "mm", "bmm", "mv", "addmm", "addmv", "addbmm", "baddbmm", "einsum", "tensordot",
    "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
)  # fmt: skip
_ALIASES = {"matmul": ("__matmul__", "__rmatmul__")}


def _functions(name: str) -> Iterator[Any]:
    """All that calls the function of this name: in `torch`, on tensors, in `torch.nn.functional`."""
    for owner in (torch, Tensor, F):
        for alias in (name, *_ALIASES.get(name, ())):
            if hasattr(owner, alias):
                yield getattr(owner, alias)


_QUIET = frozenset(function for name in _NAMES for function in _functions(name))
MATMULS = _QUIET | {F.scaled_dot_product_attention}  # which may draw


def any_of(*choices: Save) -> tuple[Save, ...]:
    """What at least one of `choices` selects, for `policy(save=…)`.

    Example:
        >>> import ckptdeco
        >>> ckptdeco.policy(save=ckptdeco.any_of("matmuls", torch.fft.fft)).segment
        1
    """
    return choices


def checkpoint_name(x: Tensor, name: str) -> Tensor:
    """Names an intermediate result of a layer, so that `policy(save=name)` keeps it and does not compute it again.

    Give it the result of an operation, before anything changes it in place. It also works on a view of such a result.

    Args:
        x: the result.
        name: what `save=` calls it.

    Returns:
        `x` itself.

    Cost:
        Compute: none unless a policy with a name in `save=` is active.

    Example:
        >>> import torch, ckptdeco
        >>> class Block(torch.nn.Linear):
        ...     @ckptdeco.checkpointable
        ...     def forward(self, x):
        ...         h = ckptdeco.checkpoint_name(super().forward(x), "linear")
        ...         return torch.tanh(h)
        >>> with ckptdeco.policy(save="linear"):
        ...     loss = Block(4, 4)(torch.ones(2, 4)).sum()
        >>> loss.backward()
    """
    if running.selection is not None:
        running.selection.name(x, name)
    return x


class Chosen(Selects):
    """What the user chose."""

    def __init__(self, functions: frozenset[Any], names: tuple[str, ...], classes: tuple[type, ...]) -> None:
        self.functions = functions
        self.names = names
        self.classes = classes
        self.has_names = bool(names)
        self.has_layers = bool(names or classes)
        self.quiet = _QUIET

    def operation(self, function: Any) -> bool:  # noqa: D102 - as in the base class
        return function in self.functions

    def name(self, name: str) -> bool:  # noqa: D102
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def layer(self, layer: Any, name: str) -> bool:  # noqa: D102
        return isinstance(layer, self.classes) or any(fnmatchcase(name, pattern) for pattern in self.names)


def selects(save: Save) -> Chosen | ContextFn:
    """What `save=` means: a selection, or contexts of torch's for operators of ATen and callables.

    Raises:
        PolicyError: it is none of what it may be.
    """
    choices = _flat(save)
    if not choices:
        raise PolicyError("save", save, "selects nothing", "leave save= out")
    if any(_is_operator(choice) or _is_callback(choice) for choice in choices):
        return _torch_contexts(save, choices)
    functions: set[Any] = set()
    names: list[str] = []
    classes: list[type] = []
    for choice in choices:
        if choice == "matmuls":
            functions |= MATMULS
        elif isinstance(choice, str):
            names.append(choice)
        elif isinstance(choice, type):
            classes.append(choice)
        elif callable(choice):
            functions |= {choice, *_functions(getattr(choice, "__name__", ""))}
        else:
            raise PolicyError(
                "save", choice, "does not say what to save",
                "give 'matmuls', a name of checkpoint_name(), a function of torch, an inner layer's class or glob",
            )  # fmt: skip
    return Chosen(frozenset(functions), tuple(names), tuple(classes))


def hashable(save: Save) -> Save:
    """The same in tuples and frozen sets, so that policies can be compared and looked up."""
    if isinstance(save, (set, frozenset)):
        return frozenset(map(hashable, save))
    if isinstance(save, (list, tuple)):
        return tuple(map(hashable, save))
    return save


def _flat(save: Save) -> list[Any]:
    if isinstance(save, (list, tuple, set, frozenset)):
        return [choice for item in save for choice in _flat(item)]
    return [save]


def _is_callback(choice: Any) -> bool:
    """Whether it is a function of the user's, which answers with torch's `CheckpointPolicy`."""
    if isinstance(choice, (str, type)) or not callable(choice) or _is_operator(choice):
        return False
    return str(getattr(choice, "__module__", None) or "torch").split(".")[0] != "torch"


def _is_operator(choice: Any) -> bool:
    """Whether it is an operator of ATen, `torch.ops.aten.mm`, or one overload of it."""
    return hasattr(choice, "overloadpacket") or callable(getattr(choice, "overloads", None))


def _torch_contexts(save: Save, choices: list[Any]) -> ContextFn:
    """Contexts of torch's selective checkpointing, which sees operators of ATen, at its cost."""
    if all(map(_is_operator, choices)):
        return partial(_contexts, frozenset([one for choice in choices for one in _overloads(choice)]), None)
    if len(choices) == 1:
        return partial(_contexts, frozenset(), choices[0])
    raise PolicyError(
        "save", save, "mixes operators of ATen, or a callable, with something else",
        "give operators only, one callable only, or functions of torch such as torch.matmul in their place",
    )  # fmt: skip


def _contexts(operators: frozenset[Any], choose: Any) -> tuple[Any, Any]:
    """The contexts of one call: for operators, or for those that a callable chooses."""
    saved: set[Any] = set()

    def policy_fn(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        if choose is None:
            answer: Any = CheckpointPolicy.MUST_SAVE if op in operators else CheckpointPolicy.PREFER_RECOMPUTE
        else:
            answer = choose(ctx, op, *args, **kwargs)
        if answer is True or answer in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            saved.add(op)
        return answer

    make: Any = create_selective_checkpoint_contexts
    forward, recompute = make(policy_fn)
    return forward, Only(recompute, saved)


def _overloads(operator: Any) -> list[Any]:
    if hasattr(operator, "overloadpacket"):
        return [operator]
    return [getattr(operator, name) for name in operator.overloads()]
