"""The tool `search`: what it finds, what it shows, and how slow it is."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.requirements import need

need("bm25s")

from toolrl.config import ToolConfig
from toolrl.errors import UserError
from toolrl.tools import Toolbox
from toolrl.tools.latency import HeavyTail
from toolrl.tools.search import NOTHING
from toolrl.trajectory import ToolCall, ToolResult

TEXTS = [
    {"title": "Danube", "text": "A river that flows through Vienna, Bratislava and Budapest."},
    {"title": "Paris", "text": "The capital of France, on the Seine."},
    {"text": "Lyon is a city in France where the Rhône meets the Saône."},
    {"title": "Long", "text": "zebra " * 400},
]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.jsonl"
    path.write_text("\n".join(json.dumps(entry) for entry in TEXTS) + "\n\n")
    return path


def box(path: Path, timeout_s: float = 30.0, **options: Any) -> Toolbox:
    options = {"corpus": str(path), **options}
    return Toolbox.build([ToolConfig("search", timeout_s=timeout_s, options=options)], None, 0)


async def ask(toolbox: Toolbox, *queries: Any, episode: str = "e") -> list[ToolResult]:
    async with toolbox.session(episode) as tools:
        return [await tools.call(ToolCall(f"call_{i}", "search", {"query": q})) for i, q in enumerate(queries)]


async def test_the_best_passages_come_first_with_their_titles(corpus: Path):
    capital, river = await ask(box(corpus, k=2), "capital of France", "which river flows through Budapest?")
    assert capital.status == "ok"
    assert capital.text.startswith("[1] Paris\nThe capital of France") and "\n\n[2] Lyon is a city" in capital.text
    assert river.text == "[1] Danube\nA river that flows through Vienna, Bratislava and Budapest."


@pytest.mark.parametrize("query", ["", "the of", "xylophone", "'; \x00 ☃", "\ud800"])
async def test_a_query_that_fits_nothing_is_told_so(corpus: Path, query: str):
    (result,) = await ask(box(corpus), query)
    assert (result.status, result.text) == ("ok", NOTHING)


async def test_a_long_passage_is_cut(corpus: Path):
    (result,) = await ask(box(corpus, passage_characters=50, k=9), "zebra")
    assert result.text.startswith("[1] Long\nzebra") and result.text.endswith("…") and len(result.text) < 70


async def test_a_wrong_query_is_an_invalid_call(corpus: Path):
    (result,) = await ask(box(corpus), {"not": "text"})
    assert result.status == "invalid_call"


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"corpuss": "x"}, "no option 'corpuss'; did you mean 'corpus'"),
        ({"corpus": "nowhere.jsonl"}, "corpus=nowhere.jsonl is no file"),
        ({"k": 0}, "k=0"),
        ({"latency": {"mean_s": 1}}, "needs mean_s and p99_s, got mean_s"),
        ({"latency": {"mean_s": 1, "p99_s": 100}}, "at most 15"),
        ({"latency": {"mean_s": 2, "p99_s": 1}}, "mean_s <= p99_s"),
    ],
)
def test_options_that_cannot_work_are_refused(corpus: Path, options: dict[str, Any], told: str):
    with pytest.raises(UserError, match=told.replace("(", r"\(")):
        box(corpus, **options)


def test_a_corpus_without_text_names_the_line(tmp_path: Path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"txt": "x"}\n')
    with pytest.raises(UserError, match="line 2"):
        box(path)
    path.write_text("\n")
    with pytest.raises(UserError, match="holds no text"):
        box(path)


def test_the_drawn_latency_has_the_mean_and_the_tail_that_were_asked_for():
    tail = HeavyTail(mean_s=0.5, p99_s=5.0)
    drawn = sorted(tail.draw(f"episode/{number}") for number in range(40_000))
    assert statistics.fmean(drawn) == pytest.approx(0.5, rel=0.06)
    assert drawn[int(0.99 * len(drawn))] == pytest.approx(5.0, rel=0.1)
    assert tail.draw("a") == tail.draw("a") != tail.draw("b")
    assert HeavyTail(mean_s=1.0, p99_s=1.0).draw("any") == pytest.approx(1.0)


async def test_a_slow_search_takes_as_long_as_was_drawn_and_times_out(corpus: Path):
    latency = {"mean_s": 0.03, "p99_s": 0.3}
    tail = HeavyTail.of(latency)
    began = time.monotonic()
    results = await ask(box(corpus, latency=latency), *["Paris"] * 4)
    assert time.monotonic() - began >= sum(tail.draw(f"e/call_{i}") for i in range(4))
    assert [result.wall_s >= tail.draw(f"e/call_{i}") for i, result in enumerate(results)] == [True] * 4
    (late,) = await ask(box(corpus, timeout_s=0.02, latency={"mean_s": 5.0, "p99_s": 5.0}), "Paris")
    assert late.status == "timeout"


async def test_searches_of_many_episodes_run_side_by_side(corpus: Path):
    toolbox = box(corpus, latency={"mean_s": 0.1, "p99_s": 0.1})
    began = time.monotonic()
    found = await asyncio.gather(*(ask(toolbox, "Danube", episode=f"e{i}") for i in range(50)))
    assert time.monotonic() - began < 2.5  # one after the other: 5 s
    assert all(results[0].text.startswith("[1] Danube") for results in found)
