"""Which modules of a model are its layers: by class, name glob, predicate, or whatever is repeated in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, TypeAlias

from torch import nn

from ckptdeco.errors import PolicyError

__all__ = ["LayerSelector", "select"]

LayerSelector: TypeAlias = type | str | Callable[[nn.Module], bool]
_Match: TypeAlias = Callable[[str, nn.Module], bool]

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
    """The innermost modules that transformers marks as layers; else the repeated blocks, by the first rule to find any.

    1. The classes of which a list holds several, wherever they stand in the model; stages are looked into.
    2. The modules that stand beside another of their class as attributes.
    3. What is alone in a list of modules: it is there to be called several times (ALBERT).
    4. Several `nn.Sequential` beside each other.
    """
    rules: list[Callable[[], _Match]] = [
        lambda: _is_innermost_marked,
        *[partial(_in_lists, model, is_block) for is_block in (_is_made_of_layers, _is_block)],
        lambda: _is_one_of(_alike_siblings(model)),
        lambda: _is_one_of(child for module in model.modules() if _is_pile(module) for child in _blocks_of(module)),
        lambda: _is_one_of(_sequences(model)),
    ]
    for rule in rules:
        found = dict(_outermost(model, rule()))
        if found:
            return found
    raise PolicyError("layers", "auto", f"found no repeated blocks in {type(model).__name__}", _what_there_is(model))


def _is_marked(module: nn.Module) -> bool:
    return any(base.__name__ == _MARKER for base in type(module).__mro__)


def _is_innermost_marked(name: str, module: nn.Module) -> bool:
    """Some models (Swin) have their stages marked as well as the layers in them."""
    return _is_marked(module) and not any(inner is not module and _is_marked(inner) for inner in module.modules())


def _is_one_of(modules: Iterable[nn.Module]) -> _Match:
    ids = set(map(id, modules))
    return lambda _, module: id(module) in ids


def _in_lists(model: nn.Module, is_block: Callable[[nn.Module], bool]) -> _Match:
    """The classes of which a list holds several blocks, and what stands in lists beside such lists.

    The lists of a list count as one, so that stages may be lists, of a single block, too (EfficientNet).
    """
    classes: set[type] = set()
    others: set[int] = set()
    for holder in model.modules():
        if not (_is_list(holder) or _is_all_alike(holder)):
            continue
        leaves = [child for child in _leaves(holder) if is_block(child)]
        n_alike = Counter(map(type, leaves))
        run_classes = {kind for kind, n in n_alike.items() if n > 1}
        for kind in list(run_classes):
            if _are_stages([child for child in leaves if type(child) is kind], is_block):
                run_classes.remove(kind)
        classes |= run_classes
        if run_classes:
            nested = [child for inner in holder.children() if _is_list(inner) for child in _leaves(inner)]
            others.update(id(child) for child in nested if is_block(child) and not _has_run(child, is_block))

    def is_match(name: str, module: nn.Module) -> bool:
        return type(module) in classes or id(module) in others

    while True:  # a class that stands beside what it also holds (the blocks of a U-Net) is one of stages, too
        found = [module for _, module in _outermost(model, is_match)]
        kinds = {type(module) for module in found} & classes
        stages = {type(outer) for outer in found for inner in outer.modules() if type(inner) in kinds - {type(outer)}}
        if not stages & classes:
            return is_match
        classes -= stages


def _are_stages(run: list[nn.Module], is_block: Callable[[nn.Module], bool]) -> bool:
    """Whether modules that stand in a row are stages, whose blocks are meant, and not the blocks themselves.

    Both may hold lists of like modules (experts, heads). But stages differ in their widths, or have nothing beside
    their lists, where blocks are all of one form and have an attention or the like as an attribute.
    """
    if not any(_has_run(module, is_block) for module in run):
        return False
    forms = {tuple(parameter.shape for parameter in module.parameters()) for module in run}
    if len(forms) == len(run) or all(map(_is_all_alike, run)):
        return True
    return not any(is_block(child) for module in run for child in module.children())


def _has_run(module: nn.Module, is_block: Callable[[nn.Module], bool]) -> bool:
    """Whether some list in the module, or the module as a list, holds several blocks of a class."""
    for holder in module.modules():
        if _is_list(holder) or _is_all_alike(holder):
            n_alike = Counter(type(child) for child in _leaves(holder) if is_block(child))
            if n_alike and n_alike.most_common(1)[0][1] > 1:
                return True
    return False


def _is_list(module: nn.Module) -> bool:
    return type(module) in _CONTAINERS


def _is_pile(module: nn.Module) -> bool:
    return type(module) in (nn.ModuleList, nn.ModuleDict)


def _is_all_alike(module: nn.Module) -> bool:
    """Whether it is a list by another name: all that it holds is of one class (the stages of RegNet and DenseNet)."""
    children = list(module.children())
    return len(children) > 1 and len(set(map(type, children))) == 1 and not _is_list(children[0])


def _leaves(holder: nn.Module) -> Iterator[nn.Module]:
    """What a list holds, lists in it looked into."""
    for child in holder.children():
        if _is_list(child):
            yield from _leaves(child)
        else:
            yield child


def _alike_siblings(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        children = _blocks_of(module)
        n_alike = Counter(map(type, children))
        yield from (child for child in children if n_alike[type(child)] > 1)


def _sequences(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        inner = [child for child in module.children() if type(child) is nn.Sequential and len(child) > 1]
        if len(inner) > 1:
            yield from inner


def _blocks_of(module: nn.Module) -> list[nn.Module]:
    return [child for child in module.children() if _is_block(child)]


def _is_block(module: nn.Module) -> bool:
    """Whether it is made of other modules and has parameters; lists of modules are looked into instead."""
    if _is_list(module) or next(module.children(), None) is None:
        return False
    return next(module.parameters(), None) is not None


def _is_made_of_layers(module: nn.Module) -> bool:
    """Whether it is a block whose parts have parameters: a norm that holds its activation is not."""
    return _is_block(module) and any(next(child.parameters(), None) is not None for child in module.children())


def _what_there_is(model: nn.Module) -> str:
    """The fix of the error: the classes of modules that could be meant."""
    classes = Counter(type(module).__name__ for module in model.modules() if _is_block(module) and module is not model)
    if not classes:
        return "name the layers: layers= a class, a name glob or a predicate; or put them into nn.Sequential's"
    names = ", ".join(f"{name} ({n}x)" for name, n in classes.most_common(_MAX_NAMES))
    return f"name the layers: layers= a class, a name glob or a predicate; there are {names}"
