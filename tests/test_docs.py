import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_no_placeholder_is_left_and_every_file_that_is_named_exists(path):
    text = path.read_text()
    assert re.findall(r"@[A-Z]+@", text) == []
    linked = re.findall(r"\]\(([^)#:]+)\)", text)
    named = re.findall(r"`((?:configs|scripts|tests)/[\w./]+)`", text)
    missing = [name for name in linked if not (path.parent / name).exists()]
    missing += [name for name in named if not (ROOT / name).exists()]
    assert missing == []


def test_every_test_that_the_cases_name_exists():
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "docs" / "cases.md").read_text())
    assert len(named) > 200
    missing = [f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []
