"""Hypothesis strategies: a program with its policies, drawn from the catalogues."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from tests.fuzz.catalogue import Around, Backward, Between, Loop, Move, Part, drawable
from tests.fuzz.execute import SAVES
from tests.fuzz.layer import GIVES, TAKES
from tests.fuzz.program import B, L, M, P, Program

_K = st.integers(0, 3)
_PLAIN_OR_NOT = st.sampled_from(["plain", "other"])


@st.composite
def parts(draw: st.DrawFn) -> P:
    """Draws a part; most do something from the first step on."""
    name = draw(st.sampled_from(drawable(Part)))
    since = draw(st.sampled_from([0, 0, 0, 1, 2])) if Part.catalogue[name].may_begin_late else 0
    return P(name, draw(_K), since)


@st.composite
def layers(draw: st.DrawFn) -> L:
    """Draws a layer."""
    takes = draw(st.sampled_from(sorted(TAKES))) if draw(_PLAIN_OR_NOT) == "other" else "plain"
    gives = draw(st.sampled_from(sorted(GIVES))) if draw(_PLAIN_OR_NOT) == "other" else "plain"
    return L(tuple(draw(st.lists(parts(), max_size=3))), takes, gives, trains=draw(st.integers(0, 7)) > 0)


@st.composite
def moves(draw: st.DrawFn, n_layers: int) -> M:
    """Draws a move; half of them are plain calls of a layer."""
    name = draw(st.sampled_from(drawable(Move))) if draw(st.booleans()) else "call"
    return M(name, draw(st.sampled_from([0, 0, 0, 1])), draw(st.integers(0, n_layers - 1)), draw(_K))


@st.composite
def policies(draw: st.DrawFn, *, is_random: bool, indices: tuple[int, ...]) -> dict[str, Any]:
    """Draws the arguments of a policy for a program that surely calls the layers `indices`."""
    options: dict[str, Any] = {}
    kind = draw(st.sampled_from(["segment", "segment", "levels", "every", "log"]))
    if kind == "every":
        options["every"] = draw(st.integers(1, 4))
    elif kind == "log":
        options["levels"] = "log"
    else:
        options["segment"] = draw(st.sampled_from([1, 2, 3, 4, 5, 6, "sqrt", "auto"]))
        if kind == "levels":
            options["levels"] = draw(st.sampled_from([2, "log"]))
    for option in draw(st.lists(st.sampled_from(_OPTIONS), max_size=3, unique=True)):
        if option == "keep_last":
            options["keep_last"] = draw(st.integers(1, 2))
        elif option == "determinism_check":
            options["determinism_check"] = draw(st.sampled_from(["values", "none"]))
        elif option == "preserve_rng_state":
            options["preserve_rng_state"] = is_random
        elif option in ("only", "skip"):
            if len(indices) > 1 and not {"only", "skip"} & options.keys():  # a policy that matches none is an error
                options[option] = indices[:1]
        else:
            options[option] = option != "early_stop"
    return options


_OPTIONS = [
    "nested", "early_stop", "keep_last", "determinism_check", "preserve_rng_state", "only", "skip", "debug",
]  # fmt: skip


@st.composite
def programs(draw: st.DrawFn, *, max_moves: int = 7) -> Program:
    """Draws a program."""
    made = tuple(draw(st.lists(layers(), min_size=1, max_size=4)))
    code = tuple(draw(st.lists(moves(len(made)), min_size=2, max_size=max_moves)))
    between = draw(st.lists(st.builds(B, st.sampled_from(drawable(Between)), _K), max_size=2))
    around = draw(st.lists(st.sampled_from(drawable(Around)), max_size=2, unique=True))
    place = draw(st.sampled_from(["forward", "step", "all", "decorator", "generator"]))
    program = Program(
        made,
        code,
        loop=draw(st.sampled_from(["single", *drawable(Loop)])),
        backward=draw(st.sampled_from(["sum", *drawable(Backward)])),
        between=tuple(between) if draw(st.booleans()) else (),
        around=tuple(around) if draw(st.booleans()) else (),
        place=place,
        optimizer=draw(st.sampled_from(["sgd", "sgd", "adam", "none"])),
        tied=draw(st.integers(0, 7)) == 7,
        steps=draw(st.sampled_from([3, 3, 3, 5])),
        seed=draw(st.integers(0, 9)),
    )
    excluded = {name for ingredient in program.ingredients() for name in ingredient.excludes}
    is_random = any(ingredient.is_random for ingredient in program.ingredients())
    used = () if program.loop == "gan" else tuple(sorted({move.layer for move in code if move.name == "call"}))
    n_policies = 1 if place == "all" else 2
    drawn = draw(st.lists(policies(is_random=is_random, indices=used), min_size=1, max_size=n_policies))
    saves = [None, None, None, *sorted(SAVES)]
    if any(part.name.startswith("recurrent") for layer in made for part in layer.parts):
        saves.remove("operators")  # torch's contexts do not see that these kernels change what they keep
    for options in drawn:
        save = draw(st.sampled_from(saves))
        if save is not None:
            options["save"] = save
    return Program(
        **{
            **vars(program),
            "tied": program.tied and program.loop != "gan",  # which steps one half between the other's passes
            "policies": tuple(drawn),
            "around": tuple(name for name in program.around if name not in excluded),
        }
    )
