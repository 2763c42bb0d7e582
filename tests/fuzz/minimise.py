"""Makes a program that differs smaller, as long as it still differs in the same way."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from tests.fuzz.judge import Difference, judge
from tests.fuzz.program import L, Program


def difference_of(program: Program) -> str | None:
    """How the program differs, or None."""
    try:
        judge(program)
    except Difference as difference:
        return str(difference)
    return None


def minimise(program: Program, limit: int = 300) -> Program:
    """The smallest program found that differs with the same kind of complaint."""
    kind = _kind(difference_of(program) or "")
    n_tried, is_smaller = 0, True
    while is_smaller and n_tried < limit:
        is_smaller = False
        for candidate in _smaller(program):
            n_tried += 1
            complaint = difference_of(candidate)
            if complaint is not None and _kind(complaint) == kind:
                program, is_smaller = candidate, True
                break
            if n_tried >= limit:
                break
    return program


def _kind(complaint: str) -> str:
    """An error's class, or "differs": which value differs may change while a program shrinks."""
    first = complaint.split(":")[0]
    return "differs" if first.startswith("step") else first


def _without(items: tuple[Any, ...], index: int) -> tuple[Any, ...]:
    return items[:index] + items[index + 1 :]


def _with(items: tuple[Any, ...], index: int, item: Any) -> tuple[Any, ...]:
    return (*items[:index], item, *items[index + 1 :])


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with one thing less, the largest things first."""
    change = dataclasses.replace
    for field in dataclasses.fields(Program):
        if field.default is not dataclasses.MISSING and getattr(program, field.name) != field.default:
            yield change(program, **{field.name: field.default})
    for i in range(len(program.code)):
        yield change(program, code=_without(program.code, i))
    if len(program.layers) > 1:
        for i in range(len(program.layers)):
            code = tuple(
                change(m, layer=m.layer - (m.layer > i or m.layer >= len(program.layers))) for m in program.code
            )
            yield change(program, layers=_without(program.layers, i), code=code)
    for name in ("between", "around", "policies"):
        items = getattr(program, name)
        for i in range(len(items) - (name == "policies")):
            yield change(program, **{name: _without(items, i)})
    for i, policy in enumerate(program.policies):
        for key in policy if len(policy) > 1 else ():
            rest = {name: value for name, value in policy.items() if name != key}
            yield change(program, policies=_with(program.policies, i, rest))
    for i, layer in enumerate(program.layers):
        for j, part in enumerate(layer.parts):
            yield change(program, layers=_with(program.layers, i, change(layer, parts=_without(layer.parts, j))))
            for field, value in (("since", 0), ("k", 0)):
                if getattr(part, field) != value:
                    parts = _with(layer.parts, j, change(part, **{field: value}))
                    yield change(program, layers=_with(program.layers, i, change(layer, parts=parts)))
        plain = L(layer.parts)
        if layer != plain:
            yield change(program, layers=_with(program.layers, i, plain))
    for i, move in enumerate(program.code):
        for field, value in (("name", "call"), ("chain", 0), ("layer", 0), ("k", 0)):
            if getattr(move, field) != value:
                yield change(program, code=_with(program.code, i, change(move, **{field: value})))
