"""What is alive between forward and backward is what the policy says, to 2 %."""

from __future__ import annotations

from math import ceil, isqrt
from typing import Any

import pytest
import torch

from tests.support.chains import BOUNDARY, ROWS, WIDE, inner_bytes, live_after_forward, make_batch, make_chain, nothing
from tests.support.layers import Block, Loop, MaskedLayer, Stem, TanhLayer
from tests.support.subject import ENGINE, policy

pytestmark = pytest.mark.skipif(ENGINE != "ckptdeco", reason="measures ckptdeco")
N_STEPS = 3
LAYERS = 12


def assert_close(live: int, expected: int, what: str = "") -> None:
    assert abs(live - expected) <= 0.02 * expected, (
        f"{what}{live / BOUNDARY:.2f} boundaries, not {expected / BOUNDARY:.2f}"
    )


def test_the_meter_sees_what_the_plain_run_keeps() -> None:
    """The byte test can fail: without a policy everything is alive."""
    expected = LAYERS * (BOUNDARY + inner_bytes())
    assert_close(live_after_forward(make_chain(LAYERS), make_batch(), nothing()), expected)
    with pytest.raises(AssertionError):
        assert_close(live_after_forward(make_chain(LAYERS), make_batch(), nothing()), LAYERS * BOUNDARY)


@pytest.mark.parametrize("make", [Block, TanhLayer])
@pytest.mark.parametrize("options", [{}, {"levels": 2}, {"levels": "log"}], ids=str)
@pytest.mark.parametrize("n", [1, 2, 3, 5, 12, 40])
def test_segments_keep_one_boundary_each(n: int, options: dict[str, Any], make: Any) -> None:
    model, x, made = make_chain(LAYERS, make), make_batch(), policy(segment=n, **options)
    for step in range(N_STEPS):
        assert_close(live_after_forward(model, x, made), ceil(LAYERS / n) * BOUNDARY, f"step {step}: ")


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_every_nth_call_is_dropped(n: int) -> None:
    model, x, made = make_chain(LAYERS), make_batch(), policy(every=n)
    stored = LAYERS - ceil(LAYERS / n)
    for step in range(N_STEPS):
        assert_close(live_after_forward(model, x, made), LAYERS * BOUNDARY + stored * inner_bytes(), f"step {step}: ")


def test_sqrt_needs_one_pass_to_know_the_length() -> None:
    model, x, made = make_chain(LAYERS), make_batch(), policy(segment="sqrt")
    assert_close(live_after_forward(model, x, made), LAYERS * BOUNDARY)
    for _ in range(N_STEPS):
        assert_close(live_after_forward(model, x, made), ceil(LAYERS / isqrt(LAYERS)) * BOUNDARY)


def test_log_over_the_whole_chain_keeps_one_boundary() -> None:
    model, x, made = make_chain(LAYERS), make_batch(), policy(levels="log")
    assert_close(live_after_forward(model, x, made), LAYERS * BOUNDARY)
    for _ in range(N_STEPS):
        assert_close(live_after_forward(model, x, made), BOUNDARY)


@pytest.mark.parametrize(("n", "k"), [(2, 2), (3, 1), (4, 5), (1, 12), (1, 20)])
def test_keep_last_stores_the_last_calls_once_the_length_is_known(n: int, k: int) -> None:
    model, x, made = make_chain(LAYERS), make_batch(), policy(segment=n, keep_last=k)
    assert_close(live_after_forward(model, x, made), ceil(LAYERS / n) * BOUNDARY, "first pass errs to dropping: ")
    stored = min(k, LAYERS)
    expected = ceil((LAYERS - stored) / n) * BOUNDARY + stored * (BOUNDARY + inner_bytes())
    for step in range(N_STEPS):
        assert_close(live_after_forward(model, x, made), expected, f"step {step}: ")


def test_dropout_keeps_no_masks() -> None:
    model, x, made = make_chain(LAYERS, p=0.2), make_batch(), policy(segment=3)
    live_after_forward(model, x, made)  # the first pass finds out that the layers draw
    for _ in range(N_STEPS):
        assert_close(live_after_forward(model, x, made), ceil(LAYERS / 3) * BOUNDARY)


def test_auto_is_as_low_as_the_best_number() -> None:
    from ckptdeco.schedule.simulator import Layer, best_segment

    model, x, made = make_chain(24), make_batch(), policy(segment="auto")
    for _ in range(2):
        live_after_forward(model, x, made)
    layer = Layer(1.0, 2.0, BOUNDARY, BOUNDARY + inner_bytes())
    allowed = {ceil(24 / n) * BOUNDARY for n in range(1, best_segment([layer] * 24) + 2)}
    live = live_after_forward(model, x, made)
    assert min(abs(live - size) / size for size in allowed) <= 0.02, f"{live / BOUNDARY:.2f} boundaries"


def test_keyword_arguments_made_for_each_call_are_on_the_bill() -> None:
    """R29: a bias made for each layer is kept for each call, also inside a segment."""

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(m.layers):
            x = layer(x, mask=torch.full((ROWS, WIDE), 0.1 * i))
        return x

    model, x = Stem(Loop([MaskedLayer(WIDE) for _ in range(LAYERS)], loop), WIDE), make_batch()
    for n in (1, 3):
        made = policy(segment=n)
        for _ in range(N_STEPS):
            assert_close(live_after_forward(model, x, made), (ceil(LAYERS / n) + LAYERS) * BOUNDARY)


@pytest.mark.parametrize("needs_grad", [True, False])
def test_a_side_input_of_all_layers_is_kept_once(needs_grad: bool) -> None:
    weight = torch.ones((), requires_grad=needs_grad)

    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        mask = torch.ones(ROWS, WIDE).cumsum(0) * weight
        for layer in m.layers:
            x = layer(x, mask)
        return x

    model, x = Stem(Loop([MaskedLayer(WIDE) for _ in range(LAYERS)], loop), WIDE), make_batch()
    plain = 2 if needs_grad else 1  # the product saves the cumulative sum for the weight's gradient
    for n in (1, 3):
        made = policy(segment=n)
        for _ in range(N_STEPS):
            assert_close(live_after_forward(model, x, made), (ceil(LAYERS / n) + plain) * BOUNDARY)


def test_shared_layer_called_many_times_chains() -> None:
    model, x, made = Stem(Loop([Block(WIDE)], six), WIDE), make_batch(), policy(segment=3)
    for _ in range(N_STEPS):
        assert_close(live_after_forward(model, x, made), 2 * BOUNDARY)


def six(m: Loop, x: torch.Tensor) -> torch.Tensor:
    for _ in range(6):
        x = m.layers[0](x)
    return x


def test_two_interleaved_chains_keep_their_own_boundaries() -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        for one, two in zip(m.layers[:6], m.layers[6:], strict=True):
            x, y = one(x), two(y)
        return torch.cat([x, y])[:ROWS].clone()

    model, x, made = Stem(Loop([Block(WIDE) for _ in range(12)], loop), WIDE), make_batch(), policy(segment=3)
    for _ in range(N_STEPS):
        assert_close(live_after_forward(model, x, made), 4 * BOUNDARY)


def test_frozen_prefix_keeps_nothing() -> None:
    model, x, made = make_chain(LAYERS), make_batch(), policy(segment=2)
    model.stem.requires_grad_(False)
    for layer in model.body.layers[:6]:
        layer.requires_grad_(False)
    for _ in range(N_STEPS):
        assert_close(live_after_forward(model, x, made), 3 * BOUNDARY)


def test_view_between_layers_still_chains() -> None:
    def loop(m: Loop, x: torch.Tensor) -> torch.Tensor:
        for layer in m.layers:
            x = layer(x).view_as(x)
        return x

    model, x, made = Stem(Loop([Block(WIDE) for _ in range(LAYERS)], loop), WIDE), make_batch(), policy(segment=3)
    for _ in range(N_STEPS):
        assert_close(live_after_forward(model, x, made), 4 * BOUNDARY)
