"""Deferred results under random orders of arrival, numbers of calls and lengths of turns, against a plain model of the rule."""

from __future__ import annotations

import asyncio
import functools
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from actors.continuation import prefix_of, rebuild
from tests.deferred import Timed, calls, deferred
from tests.episodes import ANSWER, ids_of, play, tiny
from toolrl import toolcalls
from toolrl.app.tiny_tokenizer import END
from toolrl.config import ToolConfig
from toolrl.conversation import ChatFormat
from toolrl.tools import Toolbox
from toolrl.trajectory import Outcome, Trajectory
from toolrl.trajectory_codec import decode, encode

NEVER = None


@dataclass(frozen=True)
class Plan:
    """What the policy says, and when the results of its deferred calls come."""

    turns: list[tuple[str, list[str]]]  # text and the tools called: "slow" (deferred) or "calculator"
    releases: list[list[list[str]]]  # of each turn: groups of words that come while it is sampled
    again: int  # words of the answer that follows the last results


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    turns = [
        (
            " ".join(["9"] * draw(st.integers(0, 12))),
            draw(st.lists(st.sampled_from(["slow", "slow", "calculator"]), min_size=1, max_size=3)),
        )
        for _ in range(draw(st.integers(1, 5)))
    ]
    last = len(turns)  # the answer's index
    arrivals: dict[int, list[str]] = {}
    number = 0
    for index, (_, asked) in enumerate(turns):
        for tool in asked:
            if tool == "slow":
                when = draw(st.one_of(st.just(NEVER), st.integers(index + 1, last)))
                if when is not None:
                    arrivals.setdefault(when, []).append(f"w{number}")
            number += 1
    releases: list[list[list[str]]] = []
    for index in range(last + 1):
        groups: list[list[str]] = []
        for word in draw(st.permutations(arrivals.get(index, []))):
            if groups and draw(st.booleans()):
                groups[-1].append(word)
            else:
                groups.append([word])
        releases.append(groups)
    return Plan(turns, releases, draw(st.integers(0, 8)))


def expected(plan: Plan) -> tuple[list[list[tuple[str, str]]], list[list[tuple[str, str]]]]:
    """By the rule: (call id, status) of each tool turn, and for each policy turn those of its own results as they came."""
    shown: list[list[tuple[str, str]]] = []
    credit: list[list[tuple[str, str]]] = [[] for _ in range(len(plan.turns) + 1)]
    asked_in: dict[str, int] = {}
    outstanding: list[str] = []
    number = 0
    for index in range(len(plan.turns) + 1):
        here: list[tuple[str, str]] = []
        for tool in plan.turns[index][1] if index < len(plan.turns) else []:
            name = f"call_{number}"
            here.append((name, "pending" if tool == "slow" else "ok"))
            if tool == "calculator":
                credit[index].append((name, "ok"))
            asked_in[name] = index
            number += 1
        arrived = [
            name
            for group in plan.releases[index]
            for name in sorted((f"call_{word[1:]}" for word in group), key=lambda n: int(n[5:]))
        ]
        waited = index == len(plan.turns)
        late = [(name, "ok") for name in arrived]
        late += [(name, "timeout") for name in outstanding if waited and name not in arrived]
        outstanding = [name for name in outstanding if name not in arrived]
        outstanding += [name for name, status in here if status == "pending"]
        for name, status in late:
            credit[asked_in[name]].append((name, status))
        if here or late:
            shown.append(here + late)
    return shown, credit


@functools.cache
def chat() -> ChatFormat:
    schemas = Toolbox.build([ToolConfig("calculator"), deferred()], None, 0).schemas
    return ChatFormat(tiny(), tools=schemas, parser=toolcalls.get("hermes"))


def words(plan: Plan) -> list[str]:
    said, number = [], 0
    for text, asked in plan.turns:
        named = [(tool, f"w{number + i}" if tool == "slow" else f"{number + i} + 1") for i, tool in enumerate(asked)]
        said.append(calls(*named, text=text))
        number += len(asked)
    return [*said, ANSWER, "9 " * plan.again + ANSWER]


async def played(plan: Plan) -> tuple[Trajectory, Timed]:
    script = Timed(words(plan), releases=plan.releases)
    limits: dict[str, Any] = {"max_calls": 99, "max_turns": 99, "max_response_tokens": 9000, "max_context_tokens": 9999}
    episode = await play(
        script=script,
        chat=chat(),
        tool_names=("calculator", deferred()),
        components=("outcome", "timeout"),
        pending_deadline_s=0.01,
        max_observation_tokens=5000,
        **limits,
    )
    return episode, script


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(plans())
def test_late_results_keep_their_order_masks_versions_and_credit(plan: Plan):
    episode, script = asyncio.run(played(plan))
    shown, credit = expected(plan)
    assert episode.outcome is Outcome.ANSWERED
    tool_turns = [turn for turn in episode.turns if turn.kind == "tool"]
    assert [[(r.call_id, r.status) for r in turn.results] for turn in tool_turns] == shown

    # Masks and versions: what was sampled, as it was sampled, and nothing else.
    said = words(plan)[: len(episode.policy_turns)]
    assert [turn.token_ids for turn in episode.policy_turns] == [ids_of(text) for text in said]
    by_mask = [t for t, sampled in zip(episode.response_ids, episode.policy_mask(), strict=True) if sampled]
    assert by_mask == [token for text in said for token in ids_of(text)]
    for number, turn in enumerate(episode.policy_turns):
        assert set(turn.weight_versions) == {5 + number}
    # What the engine was asked to continue is what was recorded; what was shown holds the results, whole.
    for number, ask in enumerate(script.asked):
        before = [token for turn in episode.turns[: 2 * number] for token in turn.token_ids]
        assert ask["prompt_ids"] == episode.prompt_ids + before
    for turn in tool_turns:
        text = tiny().decode(turn.token_ids)
        at = 0
        for result in turn.results:  # in this order
            at = text.index(result.text, at) + len(result.text)
        assert text.count(END) == 1
        late = [r for r in turn.results if r.text.startswith("Result of ")]
        assert all(r.text.startswith(f"Result of {r.call_id}:\n") for r in late)

    # Credit: by the turn that called, receipts left out; every call has one result.
    of_turns = [[(r.call_id, r.status) for r in of_turn] for of_turn in episode.results_of_turns()]
    assert of_turns[: len(credit)] == credit and not any(of_turns[len(credit) :])
    assert sorted(name for of_turn in of_turns for name, _ in of_turn) == sorted(
        call.id for turn in episode.policy_turns for call in turn.calls
    )
    charged = [-0.1 * sum(status == "timeout" for _, status in of_turn) for of_turn in of_turns]
    assert [turn.rewards["timeout"] for turn in episode.policy_turns] == charged
    assert decode(encode(episode)) == episode
    asyncio.run(goes_on_anywhere(episode))


async def goes_on_anywhere(episode: Trajectory) -> None:
    """Whatever boundary it is taken up at: calls without a result are made again, in their order, and no others."""
    toolbox = Toolbox.build([ToolConfig("calculator"), deferred()], None, 0)
    for done in range(len(episode.policy_turns)):
        prefix = prefix_of(episode, done)
        shown = [result for turn in prefix.turns for result in turn.results]
        come = {result.call_id for result in shown if result.status != "pending"}
        async with toolbox.session("again") as session:
            assert await rebuild(prefix, session, see_nothing, as_late=lambda result: result) == []
            made = [call.id for call in session.under_way.outstanding]
        assert made == [r.call_id for r in shown if r.status == "pending" and r.call_id not in come]


async def see_nothing(trajectory: Trajectory, results: Any) -> None:
    pass
