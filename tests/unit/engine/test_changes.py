"""A witness counts versions without holding memory; only what the program changes later is copied again."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ckptdeco.engine.changes import Witness


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_witness_sees_a_change_through_any_alias(dtype: torch.dtype) -> None:
    tensor = torch.ones(3, 4).to(dtype)
    witness = Witness(tensor)
    assert not witness.is_changed()
    tensor[1].zero_()
    assert witness.is_changed()


def test_witness_outlives_the_memory() -> None:
    tensor = torch.ones(3, requires_grad=True) * 2
    witness, storage = Witness(tensor), weakref.ref(tensor.untyped_storage())
    gc.disable()
    try:
        del tensor
        assert storage() is None
    finally:
        gc.enable()
    assert not witness.is_changed()
