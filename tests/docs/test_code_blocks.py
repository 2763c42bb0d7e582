"""Every ```python block of the docs runs, and every example in a docstring says what happens.

The blocks of one page share one namespace and run in the order of the page, so a page reads as one program.
"""

from __future__ import annotations

import doctest
import importlib
import re
import sys
import types
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MODULES = sorted((ROOT / "ckptdeco").rglob("*.py"))
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run_blocks(text: str, filename: str, namespace: dict) -> int:
    """Runs a page's blocks; a failure shows the page's own line numbers. Returns how many there were."""
    n_blocks = 0
    for match in BLOCK.finditer(text):
        padding = "\n" * text.count("\n", 0, match.start(1))
        exec(compile(padding + match[1], filename, "exec"), namespace)
        n_blocks += 1
    return n_blocks


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", [page for page in PAGES if BLOCK.search(page.read_text())], ids=relative)
def test_code_blocks_of_page_run_in_order(page, tmp_path, monkeypatch):
    packages = re.findall(r"^from (transformers|accelerate|peft|lightning)\b", page.read_text(), re.MULTILINE)
    for package in packages:
        pytest.importorskip(package)
    if packages:
        warnings.simplefilter("ignore")  # what they warn each other of is not ours
    module = types.ModuleType(f"blocks_of_{page.stem.lower()}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.chdir(tmp_path)
    assert run_blocks(page.read_text(), str(page), module.__dict__) > 0


@pytest.mark.parametrize("path", MODULES, ids=relative)
def test_examples_in_docstrings_are_true(path):
    names = path.relative_to(ROOT).with_suffix("").parts
    if names[-1] == "__main__":
        pytest.skip("importing it runs the command")
    if names[-2] == "integrations" and names[-1] in ("lightning", "transformers"):
        pytest.importorskip(names[-1])
    name = ".".join(names[:-1] if names[-1] == "__init__" else names)
    module = importlib.import_module(name)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL
    runner = doctest.DocTestRunner(optionflags=flags)
    report: list[str] = []
    for example in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        runner.run(example, out=report.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(report)


def test_readme_and_tutorial_have_blocks():
    for page in (ROOT / "README.md", ROOT / "docs" / "index.md", ROOT / "docs" / "tutorial.md"):
        assert BLOCK.search(page.read_text()), page.name


def test_failing_block_is_reported_at_its_line():
    with pytest.raises(ZeroDivisionError) as caught:
        run_blocks("# page\n\n```python\nx = 1\n```\n\ntext\n\n```python\nx / 0\n```\n", "page.md", {})
    assert caught.traceback[-1].lineno == 9  # counted from 0


def test_blocks_of_a_page_share_a_namespace():
    namespace: dict = {}
    assert run_blocks("```python\nx = 1\n```\n```text\nx = 5\n```\n```python\nx += 1\n```\n", "page.md", namespace) == 2
    assert namespace["x"] == 2
