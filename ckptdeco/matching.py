"""Which layers `only=` and `skip=` mean: classes, globs on qualified names, predicates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from ckptdeco.errors import PolicyError

__all__ = ["Selector", "Selectors", "is_selected", "selectors", "shown", "unpacked"]

Selector: TypeAlias = type | str | Callable[[Any], bool]
Selectors: TypeAlias = Selector | Sequence[Selector] | None


def selectors(name: str, value: Any) -> tuple[Selector, ...] | None:
    """The selectors as a tuple, each of a kind that can be matched."""
    if value is None:
        return None
    items = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    if not items:
        raise PolicyError(name, value, "selects nothing", f"leave {name}= out")
    for item in items:
        is_layer = hasattr(item, "forward") and not isinstance(item, type)
        if is_layer or not (isinstance(item, (str, type)) or callable(item)):
            problem = "must be a class, a name glob, a predicate that takes the layer, or a list of those"
            fix = f"{name}=lambda layer: layer is the_layer" if is_layer else f"{name}='*.layers.*'"
            raise PolicyError(name, value, problem, fix)
    return items


def is_selected(chosen: Any, layer: Any, name: str) -> bool:
    """Whether one of them lets the layer through."""
    return any(
        isinstance(layer, s) if isinstance(s, type) else fnmatchcase(name, s) if isinstance(s, str) else s(layer)
        for s in chosen
    )


def unpacked(value: Any) -> Any:
    """What the user gave: one selector, or several."""
    return value[0] if isinstance(value, tuple) and len(value) == 1 else value


def shown(value: Any) -> str:
    """The value as the user wrote it; classes and functions by name."""
    value = unpacked(value)
    if isinstance(value, frozenset):
        return f"{{{', '.join(sorted(map(shown, value)))}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))})"
    return value.__qualname__ if hasattr(value, "__qualname__") else repr(value)
