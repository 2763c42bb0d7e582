"""The demo end to end on its small size, and the sentences it derives from the figures."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from ckptdeco.demo import run as demo_run
from ckptdeco.demo.command import demo
from ckptdeco.demo.model import Size
from ckptdeco.demo.run import PLAIN, POLICIES, ROWS, TORCH, Row, Settings, n_steps_in_all, run
from ckptdeco.demo.table import remarks
from ckptdeco.demo.text import VOCABULARY_SIZE, encode, make_batches, read_source
from ckptdeco.demo.timing import interleaved, median_difference, median_ratio
from ckptdeco.planning.meter import ActivationTrace, Point

MIB = 2**20
SIZE = Size()


@pytest.fixture(scope="module")
def quick():
    """The rows of one quick run, and the steps it announced and took."""
    steps = []
    settings = Settings.quick()
    rows = run(settings, on_start=lambda what: None, on_step=lambda: steps.append(1))
    return rows, len(steps), n_steps_in_all(settings)


def test_every_row_is_equal_to_plain_bit_for_bit(quick):
    rows = quick[0]
    assert list(rows) == list(ROWS)
    assert {name for name, row in rows.items() if not row.is_equal} == set()
    assert len({row.losses for row in rows.values()}) == 1


def test_layer_forwards_are_those_the_policy_says(quick):
    counted = {name: row.n_forwards for name, row in quick[0].items()}
    assert counted[PLAIN] == 12
    assert counted["every=2"] == 18
    assert {counted[name] for name in (TORCH, "segment=1", "segment=3", 'segment="sqrt"')} == {24}
    assert 24 < counted["segment=4, levels=2"] <= 36


def test_bytes_are_in_the_order_the_policies_promise(quick):
    rows = quick[0]
    kept = {name: row.forward_bytes for name, row in rows.items()}
    assert kept[PLAIN] > kept["every=2"] > kept["segment=1"] > kept["segment=3"] > kept["segment=4, levels=2"]
    assert kept["segment=1"] <= kept[TORCH]
    assert rows["segment=4, levels=2"].peak_bytes < rows["segment=1"].peak_bytes < rows["every=2"].peak_bytes
    singles = [row for name, row in rows.items() if name.startswith("segment=") and "levels" not in name]
    assert rows['segment="auto"'].peak_bytes == min(row.peak_bytes for row in singles)


def test_progress_counts_the_steps_taken(quick):
    _, n_taken, n_announced = quick
    assert n_taken == n_announced


def test_command_prints_plain_text_and_writes_a_png(quick, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("ckptdeco.demo.run.run", lambda *_, **__: quick[0])
    assert demo(tmp_path / "a.png", is_quick=True) == 0
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\r" not in printed
    assert all(name in printed for name in ROWS)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_exit_code_is_one_if_any_row_differs(quick, tmp_path, capsys, monkeypatch):
    rows = dict(quick[0])
    rows["segment=3"] = replace(rows["segment=3"], is_equal=False)
    monkeypatch.setattr("ckptdeco.demo.run.run", lambda *_, **__: rows)
    assert demo(tmp_path / "a.png", is_quick=True) == 1
    printed = capsys.readouterr().out
    assert "NO" in printed
    assert "NOT equal to the plain run: segment=3" in printed


def test_a_run_that_draws_other_random_numbers_is_not_equal(monkeypatch):
    settings = Settings.quick()
    batches = make_batches(encode(read_source(10_000)), 2, 2, settings.size.length, seed=0)

    @contextmanager
    def draws_one_more():
        torch.rand(1)
        yield

    plain = demo_run.train(PLAIN, settings, batches, lambda: None)
    assert demo_run.train(PLAIN, settings, batches, lambda: None).is_equal(plain)
    monkeypatch.setattr(demo_run, "policy_of", lambda name: draws_one_more())
    assert not demo_run.train(PLAIN, settings, batches, lambda: None).is_equal(plain)


def made_up(name: str, peak_mib: float, kept_mib: float, n_forwards: int = 24, time_ratio: float = 1.3) -> Row:
    points = (Point(0, 0.0, 0), Point(1, 0.1, int(kept_mib * MIB)), Point(2, 0.2, int(peak_mib * MIB)))
    trace = ActivationTrace(points, {"backward": points[1]}, {})
    return Row(name, trace, int(kept_mib * MIB), n_forwards, 0.2, time_ratio, (5.0, 3.0), True)


def made_up_rows(**peaks: float) -> dict[str, Row]:
    rows = [made_up(name, 20, 8) for name in (TORCH, *POLICIES)]
    rows = {PLAIN: made_up(PLAIN, 110, 110, 12, 1.0)} | {row.name: row for row in rows}
    rows["segment=3"] = made_up("segment=3", peaks.get("three", 18), 4)
    rows["segment=4, levels=2"] = made_up("segment=4, levels=2", peaks.get("two_levels", 15), 3, 33)
    rows['segment="auto"'] = made_up('segment="auto"', peaks.get("auto", 18), 8)
    return rows


def test_remark_on_a_segment_that_peaks_higher_appears_only_when_it_does():
    higher = "\n".join(remarks(made_up_rows(three=30, auto=20), SIZE))
    assert (
        "segment=3 (4.0 MiB) against segment=1 (8.0 MiB) after forward, but a peak of 30.0 against 20.0 MiB" in higher
    )
    assert "saves 18 times the size of its input" in higher  # (110 - 8) MiB / 12 layers / 0.5 MiB + 1
    assert "higher peak" not in "\n".join(remarks(made_up_rows(), SIZE))


def test_remark_says_when_auto_missed_the_lowest_peak():
    assert 'segment="auto" did not find the lowest peak: segment=3 is lower.' in remarks(made_up_rows(auto=20), SIZE)


def test_remark_on_two_levels_appears_only_when_they_save():
    assert any(line.startswith("levels=2") for line in remarks(made_up_rows(), SIZE))
    assert not any(line.startswith("levels=2") for line in remarks(made_up_rows(two_levels=40), SIZE))


def test_text_is_the_same_each_time_and_fits_the_vocabulary():
    text = read_source(50_000)
    assert text == read_source(50_000)
    assert len(text) == 50_000
    tokens = encode("aé\n")
    assert tokens.tolist() == [97, ord("?"), 10]
    assert int(encode(text).max()) < VOCABULARY_SIZE


def test_targets_are_the_inputs_one_character_later():
    batches = make_batches(torch.arange(1000), 3, batch_size=2, length=10, seed=5)
    again = make_batches(torch.arange(1000), 3, batch_size=2, length=10, seed=5)
    for (tokens, targets), (same_tokens, _) in zip(batches, again, strict=True):
        assert torch.equal(tokens + 1, targets)
        assert torch.equal(tokens, same_tokens)


def test_interleaving_runs_each_step_once_per_round_in_turning_order():
    order: list[str] = []
    ticks = iter(range(1000))
    steps = {name: (lambda name=name: order.append(name)) for name in "abc"}
    elapsed_s = interleaved(steps, 4, n_warmup=1, clock=lambda: float(next(ticks)))
    assert {name: len(values) for name, values in elapsed_s.items()} == {"a": 4, "b": 4, "c": 4}
    rounds = ["".join(order[i : i + 3]) for i in range(0, len(order), 3)]
    assert all(sorted(each) == list("abc") for each in rounds)
    assert len({each[0] for each in rounds}) == 3


def test_medians_compare_within_a_round():
    assert median_ratio([2.0, 30.0, 8.0], [1.0, 10.0, 4.0]) == 2.0
    assert median_difference([2.0, 30.0, 8.0], [1.0, 10.0, 4.0]) == 4.0
