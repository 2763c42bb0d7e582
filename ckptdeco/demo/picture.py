"""The demo's picture: live activation memory over one training step, one line per policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckptdeco.demo.run import PLAIN, TORCH, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = 2**20
# Colours that stay apart for colour-blind readers (Okabe and Ito), then dashes for a second difference.
STYLES: dict[str, dict[str, Any]] = {
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

    Above all rows on one scale, below those with the lower peaks enlarged, those that coincide in one panel. The
    horizontal axis counts tensor operations from the turn to backward, so what recomputing adds makes a line longer.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plain = rows[PLAIN]
    groups = coinciding([row for row in rows.values() if row.peak_bytes < plain.peak_bytes / 2] or [*rows.values()])
    n_columns = min(len(groups), 3)
    n_lines = -(-len(groups) // n_columns)
    figure = Figure(figsize=(11, 5 + 2.9 * n_lines), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.add_gridspec(1 + n_lines, n_columns, height_ratios=[5, *[2.9] * n_lines])

    above = figure.add_subplot(grid[0, :])
    above.set_title("Activation memory alive during one training step", loc="left", fontweight="bold")
    _draw_lines(above, list(rows.values()))
    _set_axes(above, max(row.peak_bytes for row in rows.values()))
    lowered = [group[0] for group in groups]
    _label_peaks(above, [row for row in rows.values() if row.peak_bytes > max(low.peak_bytes for low in lowered)])
    above.legend(
        above.get_lines(),
        [
            f"{row.name}:  {row.peak_bytes / MIB:.1f} MiB ({row.peak_bytes / plain.peak_bytes:.0%}), "
            f"{row.time_ratio:.2f}x"
            for row in rows.values()
        ],
        title="peak memory, and time of a step relative to plain",
        loc="upper right",
        frameon=False,
    )
    _mark_turn(above)

    highest = max(row.peak_bytes for row in lowered)
    for index, group in enumerate(groups):
        axes = figure.add_subplot(grid[1 + index // n_columns, index % n_columns])
        axes.set_title("\n".join(_in_lines([row.name for row in group])), loc="left", fontsize=10)
        _draw_lines(axes, group, width=2.4 if len(group) > 1 else 1.5)
        _set_axes(axes, highest)
        axes.set_xlim(above.get_xlim())
        axes.axhline(group[0].peak_bytes / MIB, color="#999999", linewidth=0.8, linestyle=":")
        axes.annotate(
            f"peak {group[0].peak_bytes / MIB:.1f} MiB",
            (axes.get_xlim()[1], group[0].peak_bytes / MIB),
            (0, 3),
            textcoords="offset points",
            ha="right",
            fontsize=9,
        )
        _mark_turn(axes)
    figure.supxlabel("progress through the step: tensor operations, counted from the turn to backward", fontsize=10)
    figure.savefig(path, dpi=110)


def coinciding(rows: Sequence[Row]) -> list[list[Row]]:
    """The rows in groups of the same peak (to 2 %) and the same number of layer forwards."""
    groups: list[list[Row]] = []
    for row in rows:
        for group in groups:
            is_close = abs(group[0].peak_bytes - row.peak_bytes) <= 0.02 * row.peak_bytes
            if is_close and group[0].n_forwards == row.n_forwards:
                group.append(row)
                break
        else:
            groups.append([row])
    return groups


def _draw_lines(axes: Axes, rows: Sequence[Row], width: float = 1.5) -> None:
    for row in rows:
        points = row.trace.timeline
        turn = row.trace.marks["backward"].n_operators
        axes.plot(
            [point.n_operators - turn for point in points],
            [point.live_bytes / MIB for point in points],
            drawstyle="steps-post",
            linewidth=width,
            **STYLES.get(row.name, {}),
        )
        width *= 0.75 if len(rows) <= 3 else 1  # of lines that coincide, the lower ones show at the sides


def _set_axes(axes: Axes, highest_bytes: int) -> None:
    axes.set_ylim(0, highest_bytes / MIB * 1.2)
    axes.set_ylabel("live activations (MiB)")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _mark_turn(axes: Axes) -> None:
    """A line where forward ends and backward begins."""
    axes.axvline(0, color="#999999", linewidth=1)
    for text, side, offset in (("forward", "right", -5), ("backward", "left", 5)):
        axes.annotate(
            text,
            (0, axes.get_ylim()[1] * 0.94),
            (offset, 0),
            textcoords="offset points",
            ha=side,
            color="#666666",
            fontsize=9,
        )


def _label_peaks(axes: Axes, rows: Sequence[Row]) -> None:
    for row in rows:
        peak = max(row.trace.timeline, key=lambda point: point.live_bytes)
        axes.annotate(
            row.name,
            (peak.n_operators - row.trace.marks["backward"].n_operators, peak.live_bytes / MIB),
            (8, 2),
            textcoords="offset points",
            color=str(STYLES.get(row.name, {}).get("color", "black")),
            fontweight="bold",
        )


def _in_lines(names: Sequence[str], max_characters: int = 42) -> list[str]:
    """Names joined by commas, in as many lines as they need."""
    lines = [""]
    for name in names:
        if lines[-1] and len(lines[-1]) + len(name) + 2 > max_characters:
            lines[-1] += ","
            lines.append(name)
        else:
            lines[-1] += f", {name}" if lines[-1] else name
    return lines
