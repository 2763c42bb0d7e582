"""The numbered rules of docs/explanation/semantics.md and those that the code cites are the same."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parent.parent.parent / "docs" / "explanation" / "semantics.md"
N_RULES = 38
NOT_YET = "Not enforced yet"
FOLLOWS = re.compile(r"Follows\s+from\s+R(\d+)")


def sections(text: str) -> dict[int, str]:
    """Rule -> its heading and text."""
    parts = re.split(r"^### R(\d+)\b", text, flags=re.MULTILINE)
    return {int(number): body for number, body in zip(parts[1::2], parts[2::2], strict=True)}


def complaints(cited: set[int], text: str) -> list[str]:
    """Where the code and the page disagree."""
    rules = sections(text)
    found = [f"R{rule} is cited by the code, but not explained" for rule in sorted(cited - rules.keys())]
    for rule, body in rules.items():
        source = FOLLOWS.search(body)
        if rule not in cited and NOT_YET not in body and not (source and int(source[1]) in cited):
            found.append(f"R{rule} is cited nowhere in the code; say '{NOT_YET}' or cite it where it is enforced")
        if rule in cited and NOT_YET in body:
            found.append(f"R{rule} is cited by the code, but the page says '{NOT_YET}'")
    return found


def test_rules_of_the_page_and_rules_cited_by_the_code_agree(build_reference):
    assert complaints(set(build_reference.citing_modules()), PAGE.read_text()) == []


def test_every_rule_has_one_section_in_order():
    numbers = [int(number) for number in re.findall(r"^### R(\d+)\b", PAGE.read_text(), re.MULTILINE)]
    assert sorted(numbers) == list(range(1, N_RULES + 1))


def test_disagreements_are_found():
    text = "### R1 One\n\nText.\n\n### R2 Two\n\nNot enforced yet.\n"
    assert complaints({1}, text) == []
    assert len(complaints({1, 3}, text)) == 1
    assert len(complaints(set(), text)) == 1
    assert len(complaints({1, 2}, text)) == 1
    assert complaints({1}, text.replace("Not enforced yet", "Follows from R1")) == []
    assert len(complaints({1}, text.replace("Not enforced yet", "Follows from R3"))) == 1


def test_citations_are_read_from_comments_and_strings_only(build_reference):
    assert build_reference.citations_in("R1 = 2  # see R3 and R40\n'''R5'''\nR60x = R7\n") == {3, 5, 40}


def test_lines_under_a_rule_are_made_anew_and_stay_the_same(build_reference, monkeypatch):
    monkeypatch.setattr(build_reference, "citing_modules", lambda: {1: ["`a.py`"]})
    monkeypatch.setattr(build_reference, "citing_tests", dict)
    once = build_reference.semantics_page("# Page\n\n## A\n\n### R1 One\n\nText.\n\n## B\n\n### R2 Two\n\nMore.\n")
    assert "Text.\n\n* Cited by: `a.py`.\n* Tested by: nothing yet.\n\n## B" in once
    assert build_reference.semantics_page(once) == once
