"""Which modules of a model are its layers: by class, name glob, predicate, or whatever is repeated in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

from torch import nn

from ckptdeco.errors import PolicyError

__all__ = ["LayerSelector", "select"]

LayerSelector: TypeAlias = type | str | Callable[[nn.Module], bool]

_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_MARKER = "GradientCheckpointingLayer"  # base class by which transformers marks what its own checkpointing wraps
_MAX_NAMES = 8


def select(model: nn.Module, layers: LayerSelector | Sequence[LayerSelector]) -> dict[str, nn.Module]:
    """The matching modules of `model` by qualified name, in order of registration; of nested matches the outermost.

    Raises:
        PolicyError: nothing matches, or `layers` is none of what it may be.
    """
    if isinstance(layers, str) and layers == "auto":
        return _repeated_blocks(model)
    selectors: list[Any] = list(layers) if isinstance(layers, (list, tuple, set, frozenset)) else [layers]
    if not selectors or not all(isinstance(s, (type, str)) or callable(s) for s in selectors):
        raise PolicyError(
            "layers",
            layers,
            "does not say which modules are layers",
            "give a class, a name glob such as 'encoder.layers.*', a predicate, several of these, or 'auto'",
        )
    found = dict(_outermost(model, lambda name, module: any(_matches(s, name, module) for s in selectors)))
    if not found:
        raise PolicyError("layers", layers, f"matches no module of {type(model).__name__}", _what_there_is(model))
    return found


def _matches(selector: LayerSelector, name: str, module: nn.Module) -> bool:
    if isinstance(selector, type):
        return isinstance(module, selector)
    if isinstance(selector, str):
        return fnmatchcase(name, selector)
    return bool(selector(module))


def _outermost(
    root: nn.Module, is_match: Callable[[str, nn.Module], bool], prefix: str = "", seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Modules below `root` that match, none inside another, each once."""
    seen = set() if seen is None else seen
    for child_name, child in root.named_children():
        name = f"{prefix}{child_name}"
        if id(child) in seen:
            continue
        seen.add(id(child))
        if is_match(name, child):
            yield name, child
        else:
            yield from _outermost(child, is_match, f"{name}.", seen)


def _repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that transformers marks as layers; else those of which a module holds several alike.

    Else what is alone in a list of modules: it is there to be called several times (ALBERT). Else `nn.Sequential`s that
    stand beside each other.
    """
    alike: set[int] = set()
    listed: set[int] = set()
    sequences: set[int] = set()
    for module in model.modules():
        children = [child for child in module.children() if _is_block(child)]
        n_alike = Counter(type(child) for child in children)
        alike.update(id(child) for child in children if n_alike[type(child)] > 1)
        inner = [child for child in module.children() if type(child) is nn.Sequential and len(child) > 1]
        if len(inner) > 1:
            sequences.update(map(id, inner))
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            listed.update(map(id, children))
    rules: list[Callable[[str, nn.Module], bool]] = [
        lambda _, module: any(base.__name__ == _MARKER for base in type(module).__mro__),
        lambda _, module: id(module) in alike,
        lambda _, module: id(module) in listed,
        lambda _, module: id(module) in sequences,
    ]
    for rule in rules:
        found = dict(_outermost(model, rule))
        if found:
            return found
    raise PolicyError("layers", "auto", f"found no repeated blocks in {type(model).__name__}", _what_there_is(model))


def _is_block(module: nn.Module) -> bool:
    """Whether it is made of other modules and has parameters; lists of modules are looked into instead."""
    if type(module) in _CONTAINERS or next(module.children(), None) is None:
        return False
    return next(module.parameters(), None) is not None


def _what_there_is(model: nn.Module) -> str:
    """The fix of the error: the classes of modules that could be meant."""
    classes = Counter(type(module).__name__ for module in model.modules() if _is_block(module) and module is not model)
    if not classes:
        return "name the layers: layers= a class, a name glob or a predicate; or put them into nn.Sequential's"
    names = ", ".join(f"{name} ({n}x)" for name, n in classes.most_common(_MAX_NAMES))
    return f"name the layers: layers= a class, a name glob or a predicate; there are {names}"
