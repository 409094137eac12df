"""The page of cases names only tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "cases.md"


def test_every_test_on_the_page_exists() -> None:
    missing, seen = [], 0
    for line in PAGE.read_text().splitlines():
        file = ""
        for found in re.findall(r"`((?:[\w/]+\.py)?(?:::\w+)?)`", line):
            name, _, test = found.partition("::")
            file = name or file
            path = next((p for p in (TESTS / "unit" / file, TESTS / file) if p.is_file()), None)
            seen += 1
            if path is None or (test and not re.search(rf"^(?:async )?def {test}\(", path.read_text(), re.MULTILINE)):
                missing.append(found)
    assert seen > 60 and not missing
