"""The modules that a plain function refers to, so that their state is put back as a layer's own."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ckptdeco.engine.roots import modules_behind

GLOBAL = nn.Linear(2, 2)


def uses_global(x: torch.Tensor) -> Any:
    return GLOBAL(x)


def test_modules_of_the_closure_are_found() -> None:
    layer = nn.Linear(2, 2)
    assert modules_behind(lambda x: layer(x), (), {}) == [layer]


def test_modules_named_in_globals_are_found() -> None:
    assert modules_behind(uses_global, (), {}) == [GLOBAL]


def test_modules_among_the_arguments_are_found_once() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert modules_behind(len, (layer, [layer, 1]), {"other": other}) == [layer, other]


def test_bound_method_and_partial_lead_to_their_module() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    assert modules_behind(layer.forward, (), {}) == [layer]
    assert modules_behind(functools.partial(layer.forward, other), (), {}) == [layer, other]


def test_variable_without_a_value_is_no_error() -> None:
    def function() -> Any:
        return later

    assert modules_behind(function, (), {}) == []
    later = 1
    assert function() == 1
