"""The demo's picture: live activation memory over one training step, one line per policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ckptdeco.demo.run import PLAIN, TORCH, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
# Colours that stay apart for colour-blind readers (Okabe and Ito), then dashes for a second difference.
STYLES: dict[str, dict[str, object]] = {
    PLAIN: {"color": "#555555"},
    TORCH: {"color": "#000000", "linestyle": (0, (1, 1.5))},
    "every=2": {"color": "#E69F00"},
    "segment=1": {"color": "#0072B2"},
    "segment=3": {"color": "#CC79A7"},
    'segment="sqrt"': {"color": "#D55E00", "linestyle": (0, (5, 2))},
    "segment=4, levels=2": {"color": "#009E73"},
    'segment="auto"': {"color": "#56B4E9", "linestyle": (0, (3, 2, 1, 2))},
}


def draw(rows: Mapping[str, Row], path: Path) -> None:
    """Write the picture as PNG.

    Above all rows on one scale, below those with the lower peaks enlarged. The horizontal axis counts tensor
    operations: forward ends at the same place for all, and what recomputing adds makes a line longer.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 8.2), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True)
    turn = rows[PLAIN].trace.marks["backward"].n_operators
    plain_peak = rows[PLAIN].peak_bytes
    low = [row for row in rows.values() if row.peak_bytes < plain_peak / 2]
    low = low or list(rows.values())
    _draw_axes(above, list(rows.values()), turn, [row for row in rows.values() if row not in low])
    _draw_axes(below, low, turn, low)
    above.set_title("Activation memory alive during one training step", loc="left", fontweight="bold")
    below.set_title("The same, enlarged: policies that stay below half of plain", loc="left")
    above.legend(
        handles=[line for line in above.get_lines() if not str(line.get_label()).startswith("_")],
        title="peak memory and step time",
        loc="upper right",
        frameon=False,
        labels=[
            f"{row.name}:  {row.peak_bytes / MIB:.1f} MiB ({row.peak_bytes / plain_peak:.0%}), {row.time_ratio:.2f}x"
            for row in rows.values()
        ],
    )
    below.set_xlabel("progress through the step (tensor operations run so far)")
    figure.savefig(path, dpi=110)


def _draw_axes(axes: Axes, rows: Sequence[Row], turn: int, labelled: Sequence[Row]) -> None:
    highest = max(row.peak_bytes for row in rows) / MIB
    axes.set_ylim(0, highest * 1.18)
    axes.set_ylabel("live activations (MiB)")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for row in rows:
        points = row.trace.timeline
        axes.step(
            [point.n_operators for point in points],
            [point.live_bytes / MIB for point in points],
            where="post",
            label=row.name,
            linewidth=1.6,
            **STYLES.get(row.name, {}),
        )
    axes.axvline(turn, color="#999999", linewidth=1)
    for text, side, offset in (("forward ", "right", -4), (" backward", "left", 4)):
        axes.annotate(
            text,
            (turn, highest * 1.1),
            (offset, 0),
            textcoords="offset points",
            ha=side,
            color="#666666",
            fontsize=10,
        )
    _label_peaks(axes, labelled, highest)


def _label_peaks(axes: Axes, rows: Sequence[Row], highest: float) -> None:
    """Write each line's name at its peak; lines with the same course share one label."""
    groups: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        groups.setdefault((round(row.peak_bytes / MIB / highest * 100), row.n_forwards), []).append(row)
    for group in groups.values():
        peak = max(group[0].trace.timeline, key=lambda point: point.live_bytes)
        axes.annotate(
            " = ".join(row.name for row in group),
            (peak.n_operators, peak.live_bytes / MIB),
            (0, 4),
            textcoords="offset points",
            ha="center",
            fontsize=9,
            color=str(STYLES.get(group[0].name, {}).get("color", "black")),
        )
