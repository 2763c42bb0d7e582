"""docs/build_reference.py as a fixture: it is a script, not a part of the package."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent.parent / "docs" / "build_reference.py"


@pytest.fixture(scope="session")
def build_reference():
    spec = importlib.util.spec_from_file_location("build_reference", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
