"""How long planning takes, and what the plans would bring: ``python -m benchmarks.planning``.

Chains of layers shaped like transformer blocks, all alike and all different, are planned for several budgets, each by a
planner of its own. Planning is in CPU seconds of this process, medians. What a plan brings is as predicted, relative to
the plain pass; nothing is trained.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

from ckptdeco.schedule import Layer, Option, Plan, Planner

T = TypeVar("T")
BUDGETS = (0.8, 0.5, 0.3, 0.15, 0.1, 0.07)
KIB = 1 << 10
X = 4096 * KIB  # bytes of a block's input


def block(rng: random.Random | None, *, with_menu: bool) -> Layer:
    """A transformer block: saves 17 times its input, and early stop skips 26 % of its forward."""

    def size(n_bytes: float) -> int:
        return int(n_bytes * (rng.uniform(0.9, 1.1) if rng else 1.0)) // 512 * 512

    menu = (Option("matmuls", size(8 * X), 0.17, 0.05, size(4 * X)),) if with_menu else ()
    seconds = rng.uniform(0.9, 1.1) if rng else 1.0
    return Layer(
        seconds, 2.0 * seconds, size(X), size(17 * X), None, size(2 * X), size(4 * X), 0.26 * seconds, menu=menu
    )


def timed(function: Callable[[], T], rounds: int) -> tuple[float, T]:
    """Median CPU seconds of a call, and what it returned last."""
    seconds = []
    for _ in range(rounds):
        before = time.process_time()
        result = function()
        seconds.append(time.process_time() - before)
    return statistics.median(seconds), result


def chain(n_layers: int, *, are_alike: bool, with_menu: bool) -> list[Layer]:
    rng = random.Random(n_layers)
    return [block(None if are_alike else rng, with_menu=with_menu) for _ in range(n_layers)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--layers", type=int, nargs="+", default=[24, 50, 200])
    parser.add_argument("--slots", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--menu", action="store_true", help="with save='matmuls' on the menu of each layer")
    args = parser.parse_args()
    # The first use of numpy is not part of planning.
    Planner(chain(3, are_alike=True, with_menu=False)).fastest(40 * X)
    print(f"{'layers':>6} {'':9} {'budget':>6} {'planning':>9} {'of budget':>9} {'time':>6}  schedule")
    for n_layers in args.layers:
        for are_alike in (True, False):
            layers = chain(n_layers, are_alike=are_alike, with_menu=args.menu)
            for share in BUDGETS:
                budget = int(Planner(layers).plain.peak_bytes * share)

                def plan(layers: list[Layer] = layers, budget: int = budget) -> tuple[Planner, Plan]:
                    planner = Planner(layers, head_bytes=X, n_slots=args.slots)
                    return planner, planner.fastest(max(budget, planner.plain.peak_bytes // 16))

                seconds, (planner, found) = timed(plan, args.rounds)
                print(
                    f"{n_layers:6} {'alike' if are_alike else 'different':9} {share:6.2f} {seconds:8.3f}s "
                    f"{found.peak_bytes / budget:9.3f} {found.elapsed_s / planner.plain.elapsed_s:6.3f}  "
                    f"{type(found.schedule).__name__}"
                )


if __name__ == "__main__":
    main()
