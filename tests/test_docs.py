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
