"""What the engine knows of a layer: found by identity, held weakly, kept per way of calling it (R19)."""

from __future__ import annotations

import copy
import gc
import weakref

from torch import nn

from ckptdeco.engine.layer import LayerInfo, Protection, layer_info


def info_of(layer: nn.Module) -> LayerInfo:
    return layer_info(layer, type(layer).forward)


def test_one_layer_has_one_record() -> None:
    layer = nn.Linear(2, 2)
    assert info_of(layer) is info_of(layer)


def test_copy_of_a_layer_has_its_own() -> None:
    layer = nn.Linear(2, 2)
    assert info_of(copy.deepcopy(layer)) is not info_of(layer)


def test_register_keeps_no_layer_alive() -> None:
    layer = nn.Linear(2, 2)
    info = info_of(layer)
    gone = weakref.ref(layer)
    del layer
    gc.collect()
    assert gone() is None
    assert info.layer() is None


def test_nothing_is_written_on_the_layer() -> None:
    layer = nn.Linear(2, 2)
    before = dict(layer.__dict__)
    info_of(layer)
    assert layer.__dict__ == before


def test_each_way_of_calling_has_its_own_protection() -> None:
    info = info_of(nn.Linear(2, 2))
    assert info.protection("training") is info.protection("training")
    assert info.protection("training") is not info.protection("evaluation")


def test_powers_of_two_are_due_for_a_check() -> None:
    """R12."""
    protection = Protection()
    due = []
    for n in range(1, 70):
        protection.n_calls = n - 1
        if protection.is_check_due():
            due.append(n)
    assert due == [1, 2, 4, 8, 16, 32, 64]


def test_label_names_layer_function_file_and_line() -> None:
    def forward(x: object) -> object:
        return x

    label = layer_info(forward, forward).label
    assert "forward" in label
    assert "test_layer.py:" in label
