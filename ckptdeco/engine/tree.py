"""Arguments and results as a flat list of tensors and a template (R3, C7).

Forward always runs on the caller's own objects. The template is only used to build arguments again for a recompute:
containers are copied as they were at entry, so what the layer did to a list or dict it was given is not done twice,
and objects are rebuilt by `copy.copy` and assignment, never by their constructor. Whatever is not a known container
is passed on as it is.
"""

from __future__ import annotations

import copy
import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

__all__ = [
    "Held",
    "Template",
    "flatten",
    "flatten_arguments",
    "is_flat",
    "objects_in",
    "path_of",
    "rebuild_arguments",
    "tensors_in",
]

_MAX_DEPTH = 16  # deeper nesting (or a cycle) is passed on as it is
_ONLY_TENSORS = {Tensor}
_ATOMS = frozenset({int, float, bool, str, bytes, type(None), complex})


class _Leaf:
    """Place of a tensor: its index in the flat list."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class _Flat:
    """Arguments that are all tensors, given by position: the common case needs no tree."""

    __slots__ = ()


_FLAT = _Flat()


class Held:
    """Place of an object that the layer may change: a copy to be copied again for each recompute."""

    __slots__ = ("again", "value")

    def __init__(self, value: Any, again: Callable[[Any], Any]) -> None:
        self.value = value
        self.again = again


class _Branch:
    """A container: the object as it was at entry (a shallow copy), and the templates of its items by key."""

    __slots__ = ("items", "kind", "shell")

    def __init__(self, kind: str, shell: Any, items: Any) -> None:
        self.kind = kind
        self.shell = shell
        self.items = items


Template = Any  # _Leaf | _Branch | any other object, which stands for itself


def flatten_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Tensor], Template]:
    """The tensors among the arguments of a call, and the template of both."""
    if not kwargs and len(args) == 1 and type(args[0]) is Tensor:
        return [args[0]], _FLAT
    if not kwargs and set(map(type, args)) == _ONLY_TENSORS and len(set(map(id, args))) == len(args):
        return [*args], _FLAT
    tensors: list[Tensor] = []
    template = flatten([args, kwargs], tensors)
    return tensors, template


def is_flat(template: Template) -> bool:
    """Whether it is that of arguments that are all tensors, given by position."""
    return template is _FLAT


def objects_in(template: Template) -> Iterator[Any]:
    """What stands in a template for itself: neither tensors nor containers nor plain values."""
    if type(template) is _Branch:
        for item in template.items.values() if isinstance(template.items, dict) else template.items:
            yield from objects_in(item)
    elif type(template) not in _ATOMS and type(template) not in (_Leaf, _Flat, Held):
        yield template


def with_held_objects(template: Template, hold: Callable[[Any], Any]) -> Template:
    """The template with `Held` copies in place of the objects that `hold` gives one for."""
    if type(template) is _Branch:
        items = template.items
        if isinstance(items, dict):
            items = {key: with_held_objects(item, hold) for key, item in items.items()}
        else:
            items = [with_held_objects(item, hold) for item in items]
        return _Branch(template.kind, template.shell, items)
    if type(template) in _ATOMS or type(template) in (_Leaf, _Flat):
        return template
    return hold(template)


def rebuild_arguments(template: Template, tensors: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments to run a call again."""
    if template is _FLAT:
        return tuple(tensors), {}
    args, kwargs = rebuild(template, tensors)
    return args, kwargs


def tensors_in(value: Any) -> list[Tensor]:
    """The tensors of a result, in order."""
    if type(value) is Tensor:
        return [value]
    tensors: list[Tensor] = []
    flatten(value, tensors)
    return tensors


def flatten(value: Any, tensors: list[Tensor], depth: int = 0) -> Template:
    """Append the tensors found in `value` to `tensors` and return the template that puts them back."""
    if isinstance(value, Tensor):
        for index, tensor in enumerate(tensors):
            if tensor is value:  # the same object twice: layers ask `query is key`
                return _Leaf(index)
        tensors.append(value)
        return _Leaf(len(tensors) - 1)
    kind = type(value)
    if kind in _ATOMS or depth > _MAX_DEPTH:
        return value
    if kind is tuple:
        items = [flatten(item, tensors, depth + 1) for item in value]
        return _Branch("tuple", None, items) if _any_template(items, value) else value
    if kind is list:
        return _Branch("list", None, [flatten(item, tensors, depth + 1) for item in value])
    if kind is dict:
        return _Branch("dict", None, {k: flatten(v, tensors, depth + 1) for k, v in value.items()})
    return _flatten_other(value, tensors, depth)


def _any_template(items: list[Template], value: tuple[Any, ...]) -> bool:
    return any(item is not original for item, original in zip(items, value, strict=True))


def _flatten_other(value: Any, tensors: list[Tensor], depth: int) -> Template:
    """Subclasses of the containers, and dataclasses."""
    if isinstance(value, tuple):  # namedtuple, PackedSequence, torch.Size
        items = [flatten(item, tensors, depth + 1) for item in value]
        return _Branch("tuple subclass", type(value), items) if _any_template(items, value) else value
    if isinstance(value, dict):
        mapping = {k: flatten(v, tensors, depth + 1) for k, v in value.items()}
        return _Branch("mapping", _shell_of_mapping(value), mapping)
    if isinstance(value, list):
        shell = copy.copy(value)
        shell.clear()  # a template holds no tensor (R27)
        return _Branch("sequence", shell, [flatten(item, tensors, depth + 1) for item in value])
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: flatten(getattr(value, f.name), tensors, depth + 1)
            for f in dataclasses.fields(value)
            if hasattr(value, f.name)
        }
        husk: Any = copy.copy(value)
        for name in fields:
            object.__setattr__(husk, name, None)
        return _Branch("object", husk, fields)
    return value


def _shell_of_mapping(value: dict[Any, Any]) -> Any:
    """An empty mapping of the same type, and its attributes, without calling a constructor that may refuse."""
    if type(value) is OrderedDict:
        return OrderedDict()
    if type(value) is defaultdict:
        return defaultdict(value.default_factory)
    shell = type(value).__new__(type(value))
    if hasattr(value, "__dict__"):
        shell.__dict__.update({k: v for k, v in vars(value).items() if not isinstance(v, Tensor)})
    return shell


def path_of(template: Template, index: int) -> str | None:
    """Where tensor `index` stands in the object that `template` describes, as ``[0]['mask']``."""
    if template is _FLAT:
        return f"[0][{index}]"
    if type(template) is _Leaf:
        return "" if template.index == index else None
    if type(template) is not _Branch:
        return None
    pairs = template.items.items() if isinstance(template.items, dict) else enumerate(template.items)
    for key, item in pairs:
        path = path_of(item, index)
        if path is not None:
            return (f".{key}" if template.kind == "object" else f"[{key!r}]") + path
    return None


def rebuild(template: Template, tensors: list[Any]) -> Any:
    """The object that `template` describes, with fresh containers and the given tensors in place."""
    if type(template) is _Leaf:
        return tensors[template.index]
    if type(template) is not _Branch:
        return template.again(template.value) if type(template) is Held else template
    kind, items = template.kind, template.items
    if kind == "tuple":
        return tuple([rebuild(item, tensors) for item in items])
    if kind == "list":
        return [rebuild(item, tensors) for item in items]
    if kind == "dict":
        return {k: rebuild(v, tensors) for k, v in items.items()}
    if kind == "tuple subclass":
        return tuple.__new__(template.shell, [rebuild(item, tensors) for item in items])
    fresh = copy.copy(template.shell)
    if kind == "mapping":
        for k, v in items.items():
            fresh[k] = rebuild(v, tensors)
    elif kind == "sequence":
        fresh[:] = [rebuild(item, tensors) for item in items]
    else:
        for name, v in items.items():
            object.__setattr__(fresh, name, rebuild(v, tensors))
    return fresh
