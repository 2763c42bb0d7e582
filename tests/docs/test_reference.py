"""The reference pages say everything about the public names, and nothing stale."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ckptdeco
from ckptdeco import errors

ROOT = Path(__file__).parent.parent.parent
REFERENCE = ROOT / "docs" / "reference"
HOW_TO_REFRESH = "run `python docs/build_reference.py` and commit what it writes"


def headings(page: Path) -> set[str]:
    return {match.strip("`") for match in re.findall(r"^#{2,3} (\S+)$", page.read_text(), re.MULTILINE)}


def error_classes() -> list[str]:
    return sorted(
        name
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
        if not name.startswith("_")
    )


def undocumented(names: list[str], pages: list[Path]) -> list[str]:
    known = set().union(*(headings(page) for page in pages))
    return [name for name in names if name not in known]


def test_generated_pages_are_fresh(build_reference):
    stale = [page.name for page in build_reference.stale_pages()]
    assert stale == [], HOW_TO_REFRESH


def test_check_mode_exits_with_1_for_a_stale_page_and_writes_nothing(build_reference, tmp_path, monkeypatch, capsys):
    page = tmp_path / "api.md"
    page.write_text("old\n")
    monkeypatch.setattr(build_reference, "ROOT", tmp_path)
    monkeypatch.setattr(build_reference, "stale_pages", lambda: {page: "new\n"})
    monkeypatch.setattr(sys, "argv", ["build_reference.py", "--check"])
    assert build_reference.main() == 1
    assert "api.md is stale" in capsys.readouterr().out
    assert page.read_text() == "old\n"
    monkeypatch.setattr(sys, "argv", ["build_reference.py"])
    assert build_reference.main() == 0
    assert page.read_text() == "new\n"


def test_every_public_name_is_documented():
    names = [name for name in ckptdeco.__all__ if not name.startswith("__")]
    assert names
    assert undocumented(names, [REFERENCE / "api.md", REFERENCE / "errors.md"]) == []


def test_every_public_name_has_a_docstring():
    missing = [
        name for name in ckptdeco.__all__ if not name.startswith("__") and not inspect.getdoc(getattr(ckptdeco, name))
    ]
    assert missing == []


def test_every_error_class_is_on_the_errors_page():
    assert "CheckpointError" in error_classes()
    assert undocumented(error_classes(), [REFERENCE / "errors.md"]) == []


def test_errors_page_names_no_class_that_does_not_exist():
    assert headings(REFERENCE / "errors.md") <= set(error_classes())


def test_every_option_of_policy_is_on_the_policies_page():
    text = (REFERENCE / "policies.md").read_text()
    parameters = inspect.signature(ckptdeco.policy).parameters
    options = [name for name, parameter in parameters.items() if parameter.kind is parameter.KEYWORD_ONLY]
    assert options
    assert [name for name in options if not re.search(rf"[`(,] ?{name}=", text)] == []


def test_links_between_pages_lead_somewhere():
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert broken == []


def test_a_name_without_heading_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("## known\n\nunknown\n")
    assert undocumented(["known", "unknown"], [page]) == ["unknown"]


def test_readme_commands_are_each_the_only_block_under_their_heading():
    text = (ROOT / "README.md").read_text()
    for heading in ("Try it", "Test it"):
        section = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
        assert section, heading
        blocks = re.findall(r"^```\w*\n(.*?)^```$", section[1], re.MULTILINE | re.DOTALL)
        assert len(blocks) == 1, heading
        assert len(blocks[0].splitlines()) == 1, heading


@pytest.mark.parametrize(
    "text", ["# no such heading\n", "## Test it\n\nnone\n", "## Test it\n```\na\n```\n```\nb\n```\n"]
)
def test_ci_script_refuses_a_readme_without_the_one_command(text, tmp_path):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    (tmp_path / "README.md").write_text(text)
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "exactly one code block" in done.stderr


@pytest.mark.parametrize("status", [0, 1, 5])
def test_ci_script_runs_the_command_and_hands_on_its_status(status, tmp_path):
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "run").write_text((ROOT / ".ci" / "run").read_text())
    command = f"true && (echo closing line; exit {status})"
    other = "```\nfalse\n```\n"
    (tmp_path / "README.md").write_text(f"{other}\n## Test it\n\nSay:\n\n```bash\n{command}\n```\n\n## Next\n{other}")
    done = subprocess.run(["bash", ".ci/run"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == status
    assert done.stdout.splitlines()[-1] == "closing line"
    assert sorted(path.name for path in tmp_path.rglob("*")) == [".ci", "README.md", "run"]
