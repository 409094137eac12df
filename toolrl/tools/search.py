"""The tool `search`: BM25 over a local corpus, as slow as wished.

Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", as bm25s computes it (Lù, "BM25S",
arXiv 2407.03618). The index is made once per rollout worker; a search runs in a thread.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toolrl.config import ToolConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.tools.latency import HeavyTail
from toolrl.tools.protocol import Interpreter, function_schema, tools
from toolrl.trajectory import ToolCall, ToolResult

DESCRIPTION = "Search a collection of texts. Returns the passages that fit the query best."
NOTHING = "(no passage fits)"


@tools.register("search")
def search(config: ToolConfig, interpreter: Interpreter | None) -> SearchTool:
    """Options: `corpus`, a JSONL file of objects with `text` and, if there is one, `title`; `k`, passages shown (3);
    `passage_characters`, of each (600); `stopwords`, a language or null (en); `description`; `latency`, {mean_s, p99_s}."""
    known = ("corpus", "k", "passage_characters", "stopwords", "description", "latency")
    for option in config.options:
        if option not in known:
            raise UserError(f"tool 'search' has no option {option!r}{nearest(option, list(known))}")
    if "corpus" not in config.options:
        raise UserError("tool 'search' needs the option corpus: a JSONL file of objects with a text")
    options = dict(config.options)
    passages = read_corpus(Path(options.pop("corpus")))
    return SearchTool(passages, timeout_s=config.timeout_s, **options)


@dataclass(frozen=True)
class Passage:
    """One entry of the corpus."""

    text: str
    title: str = ""


class SearchTool:
    """BM25 over passages; keeps nothing between calls."""

    name = "search"
    keeps_no_state = True

    def __init__(
        self,
        passages: list[Passage],
        *,
        timeout_s: float,
        k: int = 3,
        passage_characters: int = 600,
        stopwords: str | None = "en",
        description: str = DESCRIPTION,
        latency: Mapping[str, Any] | None = None,
    ) -> None:
        if k < 1 or passage_characters < 1:
            raise UserError(f"tool 'search': k={k} and passage_characters={passage_characters} must be at least 1")
        self.timeout_s = timeout_s
        self.schema = function_schema(self.name, description, {"query": "what to look for"})
        self.latency = None if latency is None else HeavyTail.of(latency)
        self._characters = passage_characters
        self._index = Index(passages, k, stopwords)

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[SearchSession]:
        yield SearchSession(self, episode_id)

    async def find(self, query: str) -> str:
        """The best passages as the model sees them."""
        found = await asyncio.to_thread(self._index.best, query)
        return "\n\n".join(f"[{n}] {self._shown(passage)}" for n, passage in enumerate(found, start=1)) or NOTHING

    def _shown(self, passage: Passage) -> str:
        text = passage.text if len(passage.text) <= self._characters else passage.text[: self._characters] + "…"
        return f"{passage.title}\n{text}" if passage.title else text


class SearchSession:
    """One episode's searches; knows the episode, on which the drawn latency depends."""

    def __init__(self, tool: SearchTool, episode_id: str) -> None:
        self._tool = tool
        self._episode_id = episode_id

    async def call(self, call: ToolCall) -> ToolResult:
        if self._tool.latency is not None:
            await asyncio.sleep(self._tool.latency.draw(f"{self._episode_id}/{call.id}"))
        return ToolResult(
            call_id=call.id, name=call.name, status="ok", text=await self._tool.find(call.arguments["query"])
        )


class Index:
    """Passages with their BM25 scores. Read-only after it is made: any thread may use it."""

    def __init__(self, passages: list[Passage], k: int, stopwords: str | None) -> None:
        try:
            import bm25s
        except ImportError as error:
            raise UserError("tool 'search' needs bm25s: pip install 'toolrl[tools]'") from error
        self._bm25s = bm25s
        self._passages = passages
        self._k = min(k, len(passages))
        self._stopwords = stopwords
        self._scores = bm25s.BM25()
        whole = [f"{passage.title} {passage.text}" for passage in passages]
        self._scores.index(bm25s.tokenize(whole, stopwords=stopwords, show_progress=False), show_progress=False)

    def best(self, query: str) -> list[Passage]:
        """At most k passages that hold a word of the query, the best first."""
        words = self._bm25s.tokenize([query], stopwords=self._stopwords, return_ids=False, show_progress=False)
        ids, scores = self._scores.retrieve(words, k=self._k, show_progress=False)
        return [self._passages[index] for index, score in zip(ids[0], scores[0], strict=True) if score > 0]


def read_corpus(path: Path) -> list[Passage]:
    """The passages of a JSONL file. Raises UserError where there is none, naming the line that is wrong."""
    if not path.is_file():
        raise UserError(f"tool 'search': corpus={path} is no file")
    passages = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
                passages.append(Passage(str(entry["text"]), str(entry.get("title") or "")))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise UserError(f"tool 'search': line {number} of {path} is no object with a text: {error}") from error
    if not any(passage.text.strip() for passage in passages):
        raise UserError(f"tool 'search': corpus={path} holds no text")
    return passages
