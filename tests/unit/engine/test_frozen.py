from __future__ import annotations

import random
import threading

import numpy
import torch

from ckptdeco.engine.frozen import copy_frozen, freeze


def test_a_change_changes_the_bytes() -> None:
    for value, change in (
        (numpy.zeros(2), lambda v: v.fill(1)),
        (random.Random(1), lambda v: v.random()),
        (numpy.random.default_rng(1), lambda v: v.random()),
    ):
        before = freeze(value)
        assert before is not None
        assert freeze(value)[0] == before[0]
        change(value)
        assert freeze(value)[0] != before[0]


def test_copies_are_independent_and_share_tensors_by_reference() -> None:
    tensor = torch.ones(1)
    value = {"array": numpy.zeros(2), "tensor": tensor}
    copied = copy_frozen(value, lambda reference: reference)
    copied["array"][0] = 1
    assert value["array"][0] == 0
    assert copied["tensor"] is tensor


def test_what_cannot_be_frozen_is_none_and_its_own_copy() -> None:
    for value in (threading.Lock(), numpy.zeros(1 << 16), torch.nn.Linear(1, 1), iter([1]), b"0" * (1 << 17)):
        assert freeze(value) is None
        assert copy_frozen(value, lambda reference: reference) is value
