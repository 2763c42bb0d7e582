"""A measurement as a value: text, JSON, predictions."""

from __future__ import annotations

import dataclasses
import json

import pytest

import ckptdeco
from ckptdeco.planning.measurement import Base, LayerCost, Measurement
from ckptdeco.schedule import Segments, StoreLast, simulate

KIB = 1024


def layer(position: int, saved: int = 40, chain: int = 0) -> LayerCost:
    times = 0.002 + 0.001 * position, 0.004, 0.0005
    return LayerCost(f"l.{position}", position, chain, *times, 4 * KIB, saved * KIB, 4 * KIB, KIB, 2 * KIB)


BASE = Base(100 * KIB, 100 * KIB, 64, 200 * KIB, 4 * KIB, 12 * KIB, 0, 8 * KIB, True, 512, 6 * KIB, 0.003)
MEASUREMENT = Measurement((layer(0), layer(1), layer(2, 80)), BASE, 130 * KIB, 0.031, 5, 1, "cpu")

TEXT = """\
3 layer calls in 1 chain on cpu; a step under policy(segment=1) takes 31.00 ms, its activations 130.0 KiB
each of    chain  calls    forward   backward    skipped      input      saved     output   temp fwd   temp bwd
l.0 … l.1      0      2    2.50 ms    4.00 ms    0.50 ms    4.0 KiB   40.0 KiB    4.0 KiB    1.0 KiB    2.0 KiB
l.2            0      1    4.00 ms    4.00 ms    0.50 ms    4.0 KiB   80.0 KiB    4.0 KiB    1.0 KiB    2.0 KiB
sum                   3    9.00 ms   12.00 ms    1.50 ms   12.0 KiB  160.0 KiB   12.0 KiB
base: parameters 100.0 KiB, gradients 100.0 KiB, buffers 64 B, optimizer 200.0 KiB
head and loss: hold 12.0 KiB, temporaries 0 B in forward and 8.0 KiB in backward
besides: 512 B alive throughout, at most 6.0 KiB before and after the layers, 3.00 ms outside them"""


def test_prints_as_a_table() -> None:
    assert str(MEASUREMENT) == TEXT


def test_json_round_trip() -> None:
    text = MEASUREMENT.to_json()
    assert Measurement.from_json(text) == MEASUREMENT
    assert Measurement.from_json(text).to_json() == text
    assert list(json.loads(text)) == [
        *("ckptdeco", "format", "layers", "base", "peak_bytes", "step_s", "n_steps", "n_passes", "device")
    ]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", MEASUREMENT.to_json().replace('"format": 1', '"format": 2'), '{"ckptdeco": "plan"}']
)
def test_other_text_is_refused(text: str) -> None:
    with pytest.raises(ckptdeco.PolicyError, match="no measurement that this version reads"):
        Measurement.from_json(text)


def test_chains_are_those_of_the_simulator() -> None:
    both = dataclasses.replace(MEASUREMENT, layers=(layer(0), layer(0, chain=1), layer(1)))
    assert both.chains == ((layer(0).as_layer(), layer(1).as_layer()), (layer(0).as_layer(),))
    assert layer(2).as_layer().saved_bytes == 40 * KIB


def test_prediction_is_the_simulation_with_a_head_that_is_stored() -> None:
    chain = [cost.as_layer() for cost in MEASUREMENT.layers]
    expected = simulate([*chain, BASE.head()], StoreLast(Segments(2), 1, 4))
    predicted = MEASUREMENT.predict(ckptdeco.policy(segment=2))
    assert predicted.peak_bytes == expected.peak_bytes + 512
    assert predicted.elapsed_s == expected.elapsed_s + 0.003
    assert predicted.fixed_bytes == 400 * KIB + 64
    assert MEASUREMENT.predict([Segments(2)]) == predicted


def test_outside_peak_bounds_the_prediction() -> None:
    outside = dataclasses.replace(BASE, outside_peak_bytes=10**9)
    assert dataclasses.replace(MEASUREMENT, base=outside).predict(ckptdeco.policy(segment=1)).peak_bytes == 10**9


def test_each_chain_has_its_own_schedule() -> None:
    both = dataclasses.replace(MEASUREMENT, layers=(layer(0), layer(1), layer(0, chain=1), layer(1, chain=1)))
    one, other = both.predict([Segments(1), Segments(2)]), both.predict([Segments(2), Segments(1)])
    assert one.elapsed_s != other.elapsed_s or one.peak_bytes != other.peak_bytes
    assert both.predict(ckptdeco.policy(None)).peak_bytes > one.peak_bytes
