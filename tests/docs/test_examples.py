"""Every example runs as a newcomer would run it, stays short, and checks what it claims."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
OTHERS = {"accelerate", "lightning", "peft", "sklearn", "transformers"}
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples():
    assert len(EXAMPLES) >= 5


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path):
    packages = set(re.findall(r"^from (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)) & OTHERS
    for package in packages:
        pytest.importorskip(package)
    warnings = "default" if packages else "error"  # what they warn each other of is not ours
    environment = dict(os.environ, PYTHONPATH=str(ROOT), PYTHONWARNINGS=warnings, OMP_NUM_THREADS="1")
    done = subprocess.run(
        [sys.executable, str(path)], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "an example says what it showed"


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short_and_ends_in_an_assert(path):
    source = path.read_text(encoding="utf-8")
    assert len(source.splitlines()) < 80
    last = ast.parse(source).body[-1]
    assert any(isinstance(node, ast.Assert) for node in ast.walk(last))
