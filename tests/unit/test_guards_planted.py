"""Collapses planted in real traces (tokenizer, template, parser, executed programs): the real monitors show them and the real
presets see them, in time and not before; healthy mixtures of the same traces leave the guards quiet.

`toolrl bench planted` does the same with policies that are trained, and with what only a learner measures.
"""

from __future__ import annotations

import asyncio
import functools
import random
from collections.abc import Iterator, Sequence

import pytest

from tests.unit.test_cold_start_traces import CONFIG, TOKENIZER, HereInterpreter
from toolrl import presets, tasks, toolcalls
from toolrl.app.cold_start_traces import TraceMaker
from toolrl.conversation import ChatFormat
from toolrl.guards import Guards, Rule
from toolrl.guards import presets as guard_presets
from toolrl.monitors import batch_metrics
from toolrl.tools import Toolbox
from toolrl.trajectory import Trajectory

PARSER = toolcalls.get("hermes")
STEPS, PLANTED_AT, BATCH = 14, 7, 96
CALLS = {"calls_fall", "calls_fade", "calls_gone"}
FORMAT = {"polluted_turns", "collapsing_turns", "collapsed_turns", "still_collapsed"}


@pytest.fixture(scope="module")
def traces() -> dict[str, list[Trajectory]]:
    """By what they show."""
    toolbox = Toolbox.build(CONFIG.tools, interpreter=HereInterpreter(), seed=0)
    chat = ChatFormat(TOKENIZER, tools=toolbox.schemas, parser=PARSER)
    maker = TraceMaker(CONFIG, TOKENIZER, chat, PARSER, tasks.build(CONFIG.tasks, CONFIG.seed))
    found: dict[str, list[Trajectory]] = {}
    for trace in asyncio.run(maker.make(HereInterpreter())):
        found.setdefault(str(trace.metadata["kind"]), []).append(trace)
    return found


def rows(
    traces: dict[str, list[Trajectory]], seed: int, direct: float = 0.0, malformed: float = 0.0
) -> Iterator[dict[str, float]]:
    """The metrics of steps whose batches are drawn from the traces. From the plant's step on the shares of guesses and of
    broken calls rise by `direct` and `malformed` a step."""
    draw = random.Random(seed)
    for step in range(1, STEPS + 1):
        age = max(0, step - PLANTED_AT + 1)
        weights = {"direct": 0.3 + direct * age, "malformed": 0.02 + malformed * age, "solved": 0.6, "wrong_code": 0.08}
        kinds = draw.choices(list(weights), list(weights.values()), k=BATCH)
        batch = [draw.choice(traces[kind]) for kind in kinds]
        yield {"step": step, **batch_metrics(batch, learner_version=0, format_state=PARSER.format_state)}


@functools.cache
def rules_of(preset: str) -> list[Rule]:
    return guard_presets.rules(presets.load("quickstart-cpu", [f"guards.preset={preset}"]))


def fired(preset: str, steps: Sequence[dict[str, float]]) -> list[tuple[int, str]]:
    guards = Guards(rules_of(preset))
    return [(each.step, each.rule) for row in steps for each in guards.observe(int(row["step"]), row)]


@pytest.mark.parametrize("seed", range(5))
def test_guards_are_quiet_where_nothing_is_wrong(traces: dict[str, list[Trajectory]], seed: int) -> None:
    steps = list(rows(traces, seed))
    assert all(fired(preset, steps) == [] for preset in guard_presets.names())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("shares", "rules"), [({"direct": 0.3}, CALLS), ({"malformed": 0.1}, FORMAT)], ids=["interaction", "format"]
)
def test_a_planted_collapse_is_seen_by_its_rules_and_not_before(
    traces: dict[str, list[Trajectory]], seed: int, shares: dict[str, float], rules: set[str]
) -> None:
    steps = list(rows(traces, seed, **shares))
    for preset in ("watch", "standard"):
        alarms = fired(preset, steps)
        assert alarms and alarms[0][1] in rules
        assert alarms[0][0] >= PLANTED_AT
