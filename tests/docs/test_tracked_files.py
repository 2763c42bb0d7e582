"""Tracked files speak of the project alone: no path of somebody's machine, no package index."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
# in pieces, so that this file does not find itself
MACHINE_PATH = re.compile(
    r"(?<![\w.~\-$}/])/("
    + "|".join(["ho" + "me", "Us" + "ers", "ro" + "ot", "wo" + "rk", "tm" + "p", "op" + "t", "mn" + "t"])
    + r")/"
    r"|\b[A-Z]:\\" + "Us" + "ers"
)
INDEX = re.compile("|".join(["index-" + "url", "pypi\\.or" + "g", "find-" + "links"]))
BINARY = {".png", ".gif", ".jpg", ".pt"}


def complaints(text: str, name: str) -> list[str]:
    return [
        f"{name}:{number}: {line.strip()[:100]}"
        for number, line in enumerate(text.splitlines(), 1)
        if MACHINE_PATH.search(line) or INDEX.search(line)
    ]


def tracked_files() -> list[Path]:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git clone")
    # the clone may belong to another user than the one who tests
    git = ["git", "-c", f"safe.directory={ROOT}", "-C", str(ROOT)]
    listed = subprocess.run([*git, "ls-files", "-z"], capture_output=True, text=True, check=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def test_no_machine_path_in_a_tracked_file():
    found = []
    for path in tracked_files():
        if path.suffix not in BINARY:
            found += complaints(path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix())
    assert found == []


@pytest.mark.parametrize(
    "line",
    ["cd /ho" + "me/ada/clone", "path = '/tm" + "p/x'", "C:\\Us" + "ers\\ada", "pip install --index-" + "url x"],
)
def test_a_machine_path_is_found(line):
    assert len(complaints(line, "x.md")) == 1


@pytest.mark.parametrize(
    "line", ["#!/usr/bin/env bash", "docs/wo" + "rk/x", "a/tm" + "p/b", "$PWD/.ci/tm" + "p/cache", "~/wo" + "rk/"]
)
def test_other_paths_are_fine(line):
    assert complaints(line, "x.md") == []
