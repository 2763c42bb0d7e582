"""What ``ckptdeco demo`` does: run, show the table, write the picture, say by its exit code whether all was equal."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ckptdeco.extras import MissingExtraError


def check_extra() -> None:
    """Raise `MissingExtraError` if rich or matplotlib is missing."""
    missing = [name for name in ("rich", "matplotlib") if importlib.util.find_spec(name) is None]
    if missing:
        raise MissingExtraError(missing, "demo")


def demo(png: Path, *, n_steps: int | None = None, is_quick: bool = False) -> int:
    """Run the demo and print to standard output.

    Args:
        png: where the picture goes.
        n_steps: training steps per row; None: the default.
        is_quick: a tiny model, for trying the command itself.

    Returns:
        the exit code: 0, or 1 if any row differs from the plain run.

    Raises:
        MissingExtraError: rich or matplotlib is not installed.

    Cost:
        about a minute on two cores, 1 GiB of memory.
    """
    check_extra()
    from dataclasses import replace

    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from ckptdeco.demo.picture import draw
    from ckptdeco.demo.run import Settings, n_steps_in_all, run
    from ckptdeco.demo.table import for_whom, how_to_read, make_list, make_table, remarks

    settings = Settings.quick() if is_quick else Settings()
    if n_steps is not None:
        settings = replace(settings, n_steps=n_steps)
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=100)
    size = settings.size
    console.print(
        f"Training a {size.n_layers}-layer transformer (width {size.width}, {size.batch_size} x {size.length} "
        f"characters, dropout) on the source of Python's standard library, {settings.n_steps} steps per row."
    )
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("reading", total=n_steps_in_all(settings))
        rows = run(
            settings,
            on_start=lambda what: progress.update(task, description=what),
            on_step=lambda: progress.advance(task),
        )
    console.print(make_table(rows))
    console.print(how_to_read(), end="\n\n")
    console.print("Take")
    console.print(make_list(for_whom(rows)))
    console.print("\nRemarks")
    console.print(make_list([("-", remark) for remark in remarks(rows, size)]))
    draw(rows, png)
    console.print(f"\nMemory over one step, as a picture: {png}", markup=False)
    return 0 if all(row.is_equal for row in rows.values()) else 1
