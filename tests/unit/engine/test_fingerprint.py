"""Fingerprints notice what a comparison of values has to notice, and are equal for what is equal (R12)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ckptdeco.engine.fingerprint import _weights, fingerprint, is_noise
from ckptdeco.engine.torch_private import TorchDispatchMode

SIZES = [1, 2, 3, 7, 8, 9, 63, 1000, 8191, 8192, 8193, 16384, 16385, 100_003]
DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


def some(n: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    if dtype is torch.bool:
        return torch.rand(n) < 0.5
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(n, dtype=dtype)
    return torch.randint(0, 100, (n,), dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_equal_values_have_equal_fingerprints(n: int, dtype: torch.dtype) -> None:
    x = some(n, dtype)
    assert fingerprint(x) == fingerprint(x.clone())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", SIZES)
def test_one_changed_bit_is_noticed_anywhere(n: int, dtype: torch.dtype) -> None:
    x = some(n, dtype)
    before = fingerprint(x)
    octets = x.view(torch.uint8) if dtype is not torch.bool else x
    for place in {0, octets.numel() // 2, octets.numel() - 1}:
        for bit in (0, 7) if dtype is not torch.bool else (0,):
            changed = x.clone()
            view = changed.view(torch.uint8)
            view[place] ^= 1 << bit
            assert fingerprint(changed) != before, (place, bit)


@pytest.mark.parametrize("n", [2, 3, 17, 8193, 20_000])
def test_permutations_are_noticed(n: int) -> None:
    x = torch.randn(n)
    swapped = x.clone()
    swapped[0], swapped[-1] = x[-1], x[0]
    assert fingerprint(swapped) != fingerprint(x)
    assert fingerprint(x.flip(0)) != fingerprint(x)


def test_exchanged_rows_are_noticed() -> None:
    x = torch.randn(4, 8192 * 2)
    assert fingerprint(x[[1, 0, 2, 3]]) != fingerprint(x)


@pytest.mark.parametrize("n", [1, 2, 16, 8192, 16384, 16387])
def test_constants_are_told_apart(n: int) -> None:
    values = [0.0, 1.0, 2.0, 0.5, -3.0, float("inf"), float("nan")]
    assert len({fingerprint(torch.full((n,), value)) for value in values}) == len(values)


def test_tiny_difference_is_noticed() -> None:
    x = torch.randn(1000)
    y = x.clone()
    y[500] = torch.nextafter(y[500], torch.tensor(9.0))
    assert fingerprint(x) != fingerprint(y)


# Words are summed modulo 2**64, where the top bits of two words, which are signs, would cancel.
@pytest.mark.parametrize("n", [2, 8, 100, 8192, 20_000])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_changed_signs_are_noticed(n: int, dtype: torch.dtype) -> None:
    x = some(n, dtype)
    assert fingerprint(-x) != fingerprint(x)


def test_two_changed_signs_are_noticed() -> None:
    x = torch.randn(8)
    y = x.clone()
    y[1] *= -1
    y[3] *= -1
    assert fingerprint(y) != fingerprint(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.uint8, torch.complex64], ids=str)
@pytest.mark.parametrize("offset", [1, 2, 3, 5, 7])
def test_odd_offsets_do_not_matter(offset: int, dtype: torch.dtype) -> None:
    x = some(100, dtype)
    assert fingerprint(x[offset:]) == fingerprint(x[offset:].clone())


def test_strides_do_not_matter() -> None:
    x = torch.randn(6, 5)
    assert fingerprint(x.t()) == fingerprint(x.t().contiguous())
    assert fingerprint(x[:, ::2]) == fingerprint(x[:, ::2].contiguous())
    assert fingerprint(x.t()) != fingerprint(x)


def test_conjugate_and_negative_bits_are_resolved() -> None:
    x = torch.randn(5, dtype=torch.complex64)
    assert fingerprint(x.conj()) == fingerprint(x.conj().resolve_conj())
    assert fingerprint(x.conj()) != fingerprint(x)
    assert fingerprint(x.conj().imag) == fingerprint(x.conj().imag.resolve_neg())


def test_nan_equals_itself() -> None:
    x = torch.tensor([float("nan"), 1.0])
    assert fingerprint(x) == fingerprint(x.clone())


def test_empty_and_scalar_tensors_have_one() -> None:
    assert fingerprint(torch.empty(0)) == fingerprint(torch.empty(0, 3))
    assert fingerprint(torch.tensor(1.0)) != fingerprint(torch.tensor(2.0))


class Sub(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "unreadable", [torch.empty(3, device="meta"), torch.eye(3).to_sparse(), torch.randn(3).as_subclass(Sub)]
)
def test_what_cannot_be_read_has_none(unreadable: torch.Tensor) -> None:
    assert fingerprint(unreadable) is None


def test_parameter_is_read_as_its_values() -> None:
    p = nn.Parameter(torch.randn(3))
    assert fingerprint(p) == fingerprint(p.detach())


def test_reading_draws_nothing_and_builds_no_graph() -> None:
    _weights.cache_clear()
    before = torch.get_rng_state()
    x = torch.randn(3, requires_grad=True)
    torch.set_rng_state(before)
    n_version = x._version
    fingerprint(x)
    assert torch.equal(torch.get_rng_state(), before)
    assert x._version == n_version


def test_users_modes_do_not_see_it() -> None:
    seen = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if getattr(func, "__name__", "") not in ("__get__", "_set_grad_enabled"):  # these compute nothing
                seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.randn(3)
    expected = fingerprint(x)
    with Function(), Dispatch():
        assert fingerprint(x) == expected
        assert seen == []
        x + 1
        assert seen


def test_memory_that_was_freed_is_not_read() -> None:
    tensor = torch.randn(4, 4)
    tensor.untyped_storage().resize_(0)
    assert fingerprint(tensor) is None


def test_workspace_that_differs_in_every_run_is_noise_and_what_was_computed_is_not():
    runs = [torch.arange(64, dtype=torch.uint8) + i for i in range(4)]
    assert is_noise(fingerprint(runs[0]), *runs[1:])
    assert not is_noise(fingerprint(runs[0]), runs[1], runs[0], runs[0])
    computed = [run.float() for run in runs]
    assert not is_noise(fingerprint(computed[0]), *computed[1:])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int64, torch.float32], ids=str)
def test_forward_in_memory_that_an_earlier_run_had_filled_is_noise_only_where_it_is_filled(dtype: torch.dtype) -> None:
    filling = float("nan") if dtype.is_floating_point else torch.iinfo(dtype).max
    filled = torch.arange(64).to(dtype)
    filled[40:] = filling
    value = filled.clone()
    value[40:] = 7
    assert is_noise(fingerprint(filled), value, filled, filled)
    value[3] += 1  # which a kernel wrote
    assert not is_noise(fingerprint(filled), value, filled, filled)
