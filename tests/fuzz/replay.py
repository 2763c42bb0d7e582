"""`python -m tests.fuzz.replay "Program(…)"` runs a program that the fuzzer printed once more."""

from __future__ import annotations

import sys

from tests.fuzz.judge import Difference, judge
from tests.fuzz.program import read


def main(texts: list[str]) -> int:
    """Runs each program; 1 if one of them differs."""
    status = 0
    for text in texts:
        try:
            print(judge(read(text)))
        except Difference as difference:
            print(f"DIFFERS: {difference}")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [sys.stdin.read()]))
