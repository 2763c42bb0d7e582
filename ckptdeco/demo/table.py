"""The demo's table, and what to make of it in plain words. Every sentence is derived from the figures measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ckptdeco.demo.model import Size
from ckptdeco.demo.run import PLAIN, TORCH, Row

if TYPE_CHECKING:
    from rich.table import Table

MIB = 2**20
# Who should take which row; the figures are added from the run.
FOR_WHOM = {
    PLAIN: "the step fits into memory as it is",
    "every=2": "only a little memory is missing",
    "segment=1": "much is missing; the usual first choice",
    "segment=4, levels=2": "the last bit of memory counts more than time",
    'segment="auto"': "you would rather not work out the segment length, or the chain is long",
}


def make_table(rows: Mapping[str, Row]) -> Table:
    """One line per policy, everything relative to the plain step beside the absolute figures."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for heading in ("peak\nMiB", "of\nplain", "after fwd\nMiB", "step\ntime", "layer\nforwards", "equal to\nplain"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows.values():
        table.add_row(
            row.name,
            f"{row.peak_bytes / MIB:.1f}",
            f"{row.peak_bytes / rows[PLAIN].peak_bytes:.0%}",
            f"{row.forward_bytes / MIB:.1f}",
            f"{row.time_ratio:.2f}x",
            f"{row.n_forwards}",
            "yes" if row.is_equal else "NO",
            style="" if row.is_equal else "bold red",
        )
    return table


def make_list(lines: Sequence[tuple[str, str]]) -> Table:
    """Two columns without lines, so that a long second one is wrapped below itself."""
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column()
    for left, right in lines:
        table.add_row(Text(left), Text(right))
    return table


def how_to_read() -> str:
    """What the columns mean."""
    return (
        "How to read it: peak is the most activation memory alive at once during one training step, after fwd what is "
        "still alive when forward ends; parameters, gradients and optimizer are not in it. Step time is relative to "
        'plain, measured in turns. "Equal" compares every loss, every gradient, the final weights and the random '
        "numbers drawn, bit for bit."
    )


def for_whom(rows: Mapping[str, Row]) -> list[tuple[str, str]]:
    """The policies somebody should pick: name, and when, with what it gives and costs here."""
    lines = []
    for name, when in FOR_WHOM.items():
        row = rows[name]
        cost = f" ({row.peak_bytes / rows[PLAIN].peak_bytes:.0%} of the memory, {row.time_ratio:.2f}x the time)"
        lines.append((name, f"if {when}{'' if name == PLAIN else cost}"))
    return lines


def saved_to_input_ratio(rows: Mapping[str, Row], size: Size) -> float:
    """How many times its own input a layer saves for backward (a/x), from what forward left alive with and without."""
    difference = rows[PLAIN].forward_bytes - rows["segment=1"].forward_bytes
    return difference / size.n_layers / size.boundary_bytes + 1


def remarks(rows: Mapping[str, Row], size: Size) -> list[str]:
    """What the figures show that one might not expect, and what they do not show."""
    return [*_on_results(rows), *_on_segments(rows, size), *_on_auto(rows), *_on_time(rows)]


def _on_results(rows: Mapping[str, Row]) -> list[str]:
    different = [row.name for row in rows.values() if not row.is_equal]
    if different:
        return [f"NOT equal to the plain run: {', '.join(different)}. That is a bug; please report it."]
    losses = rows[PLAIN].losses
    return [f"All {len(rows)} runs end with the same bits; the loss went from {losses[0]:.3f} to {losses[-1]:.3f}."]


def _on_segments(rows: Mapping[str, Row], size: Size) -> list[str]:
    """Longer segments keep fewer boundaries but recompute, and hold, several layers at once."""
    ratio = saved_to_input_ratio(rows, size)
    single = rows["segment=1"]
    higher = [
        row
        for name, row in rows.items()
        if name.startswith("segment=") and "levels" not in name and row.peak_bytes > single.peak_bytes * 1.01
    ]
    found = []
    if higher:
        kept = " and ".join(f"{row.name} ({row.forward_bytes / MIB:.1f} MiB)" for row in higher)
        peaks = " and ".join(dict.fromkeys(f"{row.peak_bytes / MIB:.1f}" for row in higher))
        found.append(
            f"Less kept, higher peak: {kept} against segment=1 ({single.forward_bytes / MIB:.1f} MiB) after forward, "
            f"but a peak of {peaks} against {single.peak_bytes / MIB:.1f} MiB. A layer here saves {ratio:.0f} times "
            "the size of its input, and backward holds a whole recomputed segment at once. With such layers, longer "
            f"segments pay from about {2 * ratio:.0f} layers on; this model has {size.n_layers}."
        )
    two_levels = rows["segment=4, levels=2"]
    if two_levels.peak_bytes < single.peak_bytes:
        found.append(
            f"levels=2 recomputes one layer at a time and so has fewer boundaries without that price: "
            f"{two_levels.peak_bytes / MIB:.1f} MiB, for {two_levels.n_forwards} layer forwards instead of "
            f"{single.n_forwards}."
        )
    return found


def _on_auto(rows: Mapping[str, Row]) -> list[str]:
    auto = rows['segment="auto"']
    others = [row for name, row in rows.items() if name.startswith("segment=") and "levels" not in name and row != auto]
    best = min(others, key=lambda row: row.peak_bytes)
    same = [row.name for row in others if (row.forward_bytes, row.n_forwards) == (auto.forward_bytes, auto.n_forwards)]
    if auto.peak_bytes > best.peak_bytes * 1.01:
        return [f'segment="auto" did not find the lowest peak: {best.name} is lower.']
    if same:
        return [f'segment="auto" came to the same answer as {same[0]}.']
    return []


def _on_time(rows: Mapping[str, Row]) -> list[str]:
    ours, torchs = rows["segment=1"], rows[TORCH]
    return [
        f"segment=1 and torch's checkpoint recompute the same: {ours.time_ratio:.2f}x and {torchs.time_ratio:.2f}x of "
        f"the plain time (a step took {rows[PLAIN].step_s * 1000:.0f} ms on one core). On a busy machine times move by "
        "some per cent from run to run; memory and results do not."
    ]
