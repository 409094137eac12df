"""The one list of metrics: names it knows, and the docs' tables that are made of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from toolrl.monitors.known_metrics import KNOWN_METRICS, known, markdown, suggestion, tells_of_collapse

DOCS = Path(__file__).parents[2] / "docs"
TABLES = {
    "loop.md": markdown(KNOWN_METRICS),
    "collapse.md": markdown(entry for entry in KNOWN_METRICS if tells_of_collapse(entry.pattern)),
}


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ("tool/call_rate", "tool/call_rate"),
        ("tool/call_rate/family/gcd", "tool/call_rate/family/NAME"),
        ("control/end_tool_call/mass_outside", "control/TOKEN/mass_outside"),
        ("displacement/turn_9_on", "displacement/turn_K"),
        ("ratio/clip_fraction_q3", "ratio/clip_fraction_QUARTER"),
        ("ratio/clip/by_position/1025_on", "ratio/clip/by_position/RANGE"),
        ("guard/calls_fall", "guard/RULE"),
    ],
)
def test_a_name_belongs_to_its_pattern(name: str, pattern: str) -> None:
    entry = known(name)
    assert entry is not None and entry.pattern == pattern


def test_a_name_that_nothing_measures_is_told_the_nearest() -> None:
    for name in ("tool/call_rates", "tool", "control/tool_call/mass", "tool/call_rate/family/gcd/more", ""):
        assert known(name) is None, name
    assert suggestion("tool/cal_rate") == "; did you mean 'tool/call_rate'?"


def test_each_metric_is_listed_once() -> None:
    patterns = [entry.pattern for entry in KNOWN_METRICS]
    assert len(set(patterns)) == len(patterns)


def test_the_list_is_read_without_torch() -> None:
    code = "import sys, toolrl.monitors.known_metrics; assert not {'torch', 'ray', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("page", TABLES)
def test_the_tables_in_the_docs_are_those_of_the_list(page: str) -> None:
    assert TABLES[page] in (DOCS / page).read_text(), f"run `python {__file__}`"


def write_tables() -> None:
    """Puts each table in the place of the one that stands in its page."""
    head = markdown([])
    for page, table in TABLES.items():
        path = DOCS / page
        before, _, after = path.read_text().partition(head)
        rest = after.splitlines(keepends=True)
        kept = next((index for index, line in enumerate(rest) if not line.startswith("|")), len(rest))
        path.write_text(before + table + "".join(rest[kept:]))


if __name__ == "__main__":
    write_tables()
