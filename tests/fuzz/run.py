"""`python -m tests.fuzz.run` judges many programs, shows how far it is, and minimises each that differs."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import os
import sys
import time

import hypothesis
import torch

from tests.fuzz.judge import Difference, judge
from tests.fuzz.minimise import difference_of, minimise
from tests.fuzz.program import Program
from tests.fuzz.strategy import programs

N_IN_CHUNK = 100


@dataclasses.dataclass
class Tally:
    """What became of some programs."""

    outcomes: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    differences: list[str] = dataclasses.field(default_factory=list)


def judge_chunk(seed: int, n_programs: int = N_IN_CHUNK, n_minimised: int = 3) -> Tally:
    """Draws programs from a seed and judges them; minimises the first that differ."""
    tally = Tally()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=n_programs,
        deadline=None,
        database=None,
        derandomize=False,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(programs())
    def draw(program: Program) -> None:
        try:
            tally.outcomes[judge(program)] += 1
        except Difference as difference:
            tally.outcomes["DIFFERS"] += 1
            found = str(difference)
            if len(tally.differences) < n_minimised and (smaller := difference_of(minimise(program))):
                found = f"{smaller}\nas drawn: {found}"
            tally.differences.append(found)

    draw()
    return tally


def main(arguments: list[str]) -> int:
    """Runs chunks; 1 if a program differs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=__doc__)
    parser.add_argument("--programs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first chunk")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds = range(options.seed, options.seed + -(-options.programs // N_IN_CHUNK))
    total, start = Tally(), time.monotonic()
    with multiprocessing.get_context("spawn").Pool(options.jobs, torch.set_num_threads, (1,)) as pool:
        for tally in pool.imap_unordered(judge_chunk, seeds):
            total.outcomes += tally.outcomes
            total.differences += tally.differences
            for difference in tally.differences:
                print(f"\nDIFFERS: {difference}\n", flush=True)
            print(_progress(total, options.programs, time.monotonic() - start), file=sys.stderr, flush=True)
    print(_table(total))
    return 1 if total.outcomes["DIFFERS"] else 0


def _progress(total: Tally, n_wanted: int, elapsed_s: float) -> str:
    n_done = sum(total.outcomes.values())
    each_ms = 1000 * elapsed_s / max(n_done, 1)
    return f"{n_done} of {n_wanted} programs, {total.outcomes['DIFFERS']} differ, {each_ms:.0f} ms each"


def _table(total: Tally) -> str:
    n_programs = sum(total.outcomes.values())
    lines = [f"{n_programs} programs"]
    for outcome, n in total.outcomes.most_common():
        lines.append(f"{n:7d} {100 * n / n_programs:6.2f} %  {outcome}")
    lines.append(f"{total.outcomes['DIFFERS']:7d} differences")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
