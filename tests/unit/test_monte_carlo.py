"""Monte-Carlo values as a rollout worker works them out: real buffer, episodes and tools, a script in place of the engine."""

from __future__ import annotations

import asyncio
import functools
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from actors.engine import EngineDied, Generated
from actors.episode import EpisodeRunner
from actors.monte_carlo import MonteCarlo
from actors.parking import Slots
from actors.replay import AwaitedReward, ReplaySettings, ReplayStore
from actors.running_episodes import ENGINE_DIED, RunningEpisodes
from tests.episodes import END, Script, call, tiny
from tests.unit.test_running_episodes import Remote, Tasks
from toolrl import toolcalls
from toolrl.config import Named, RewardConfig, RolloutConfig, RunConfig, TaskConfig, ToolConfig
from toolrl.conversation import ChatFormat
from toolrl.rewards import RewardPipeline
from toolrl.rewards.budget import is_measured
from toolrl.rewards.monte_carlo import chosen_boundaries
from toolrl.tasks import AnswerChecker
from toolrl.tools import Toolbox
from toolrl.trajectory import Trajectory, Turn

# What each sample of the group says: it computes the answer, or something else, or first one and then the other.
RIGHT, WRONG = call("17 * 24"), call("17 + 24")
SAMPLES = [[RIGHT], [RIGHT, WRONG], [WRONG, RIGHT]]


@dataclass
class Believer:
    """Makes its sample's calls, then answers if the last tool result is right. Continuations answer at once, but from the prompt
    they make the calls of the samples in turn."""

    at_once: int = 0
    most_at_once: int = 0
    asked: list[str] = field(default_factory=list)
    holds: str = "never"  # requests with this in their id never end

    async def generate(self, prompt_ids: list[int], *, request_id: str, **how: Any) -> Generated:
        self.asked.append(request_id)
        episode, _, turn = request_id.rpartition("-")
        number = int(episode.rpartition(".")[2])
        calls = [] if "after" in episode and "after0" not in episode else SAMPLES[number % len(SAMPLES)]
        shown = re.findall(r"<tool_response>\n(.*)\n</tool_response>", tiny().decode(prompt_ids))
        answer = f"\\boxed{{408}}{END}" if shown[-1:] == ["408"] else f"Not that.{END}"  # no answer needs no verifier
        said = calls[int(turn)] if int(turn) < len(calls) else answer
        if self.holds in request_id:
            await asyncio.Event().wait()
        self.at_once += "after" in episode
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0)
        self.at_once -= "after" in episode
        return await Script([said], version=0).generate(prompt_ids, request_id=request_id, **how)


@dataclass
class Waiting:
    """The actor's way of waiting, which is to ask again."""

    store: ReplayStore

    async def remote(self, name: str, *, limit: int, claim_s: float, timeout_s: float) -> list[AwaitedReward]:
        found = self.store.claim_unrewarded(name, limit=limit, claim_s=claim_s)
        await asyncio.sleep(0 if found else 0.005)
        return found


class Buffer(Remote):
    @property
    def wait_for_unrewarded(self) -> Waiting:
        return Waiting(self.store)


@functools.cache
def chat_with_a_calculator() -> ChatFormat:
    return ChatFormat(
        tiny(), tools=Toolbox.build([ToolConfig("calculator")], None, 0).schemas, parser=toolcalls.get("hermes")
    )


@dataclass
class World:
    store: ReplayStore
    checker: AnswerChecker
    engine: Believer = field(default_factory=Believer)

    def worker(self, **options: Any) -> tuple[RunningEpisodes, MonteCarlo]:
        rewards = RewardConfig([Named("outcome"), Named("monte_carlo", options)], weights={"monte_carlo": 0.5})
        toolbox = Toolbox.build([ToolConfig("calculator")], None, 0)
        parser = toolcalls.get("hermes")
        limits = RolloutConfig(max_turn_tokens=200, max_response_tokens=1000, max_context_tokens=2000)
        runner = EpisodeRunner(
            self.engine,
            chat_with_a_calculator(),
            parser,
            toolbox,
            RewardPipeline(rewards, self.checker),
            limits,
            tokenizer=tiny(),
            answer="boxed",
        )
        buffer, tasks = Buffer(self.store), Tasks()
        version: Any = lambda: 0  # noqa: E731
        running = RunningEpisodes("w", runner, tasks, buffer, Slots(8, 1.0), version=version, max_staleness=3)  # type: ignore[arg-type]
        config = RunConfig(rollout=limits, rewards=rewards)
        measuring = MonteCarlo.of(config, runner, tasks, buffer, self.checker)  # type: ignore[arg-type]
        assert measuring is not None
        return running, measuring

    async def played(self, **options: Any) -> MonteCarlo:
        """One group, played and waiting for its rewards."""
        running, measuring = self.worker(share=1.0, **options)
        ticket = self.store.lease_ticket("w")
        assert ticket is not None
        running.begin(ticket)
        await asyncio.gather(*running.episodes)
        assert (self.store.ledger().unrewarded, self.store.lease_batch("learner", 1, 0)) == (len(SAMPLES), None)
        return measuring

    async def measured(self, **options: Any) -> tuple[list[Trajectory], MonteCarlo]:
        """One group, played and measured, as a learner gets it."""
        measuring = await self.played(**options)
        working = asyncio.create_task(measuring.run(asyncio.Event()))
        async with asyncio.timeout(20):
            while (batch := self.store.lease_batch("learner", 1, 0)) is None:  # noqa: ASYNC110 the store tells nobody
                await asyncio.sleep(0.01)
        working.cancel()
        return [member for group in batch.trajectories() for member in group], measuring


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    settings = ReplaySettings(
        group_size=len(SAMPLES), batch_groups=1, drop_uniform_groups=False, reward_deadline_s=60.0
    )
    store = ReplayStore(tmp_path / "ledger.sqlite", settings)
    async with AnswerChecker(TaskConfig()) as checker:
        yield World(store, checker)
    assert store.ledger().balances and store.audit() == []
    store.close()


def earned(member: Trajectory) -> list[float]:
    return [turn.rewards["monte_carlo"] for turn in member.policy_turns]


async def test_a_turn_earns_what_the_solve_rate_from_there_gained_or_lost(world: World) -> None:
    group, measuring = await world.measured(continuations=3)
    # Values [1, 1], [1, 0, 0] and [0, 1, 1] after 2/3 for the prompt: their differences, times the weight.
    expected = [[1 / 6, 0.0], [1 / 6, -0.5, 0.0], [-1 / 3, 0.5, 0.0]]
    assert [earned(member) for member in group] == [pytest.approx(each) for each in expected]
    assert [member.rewards for member in group] == [{"outcome": 1.0}, {"outcome": 0.0}, {"outcome": 1.0}]
    assert (measuring.counts.continuations, measuring.counts.continuations_unscored) == (3 * 5 + 6, 0)
    assert measuring.counts.continuation_tokens > 0
    ledger = world.store.ledger()
    assert (ledger.issued, ledger.leased) == (len(SAMPLES), len(SAMPLES)), "continuations are no samples"
    assert all("branched_from" not in member.metadata for member in group)


async def test_one_number_for_the_trajectory_is_the_same_in_sum(world: World) -> None:
    group, _ = await world.measured(continuations=1, aggregate="mean", per="trajectory")
    assert [m.rewards["monte_carlo"] for m in group] == [pytest.approx(0.5 * v) for v in (1.0, 1 / 3, 2 / 3)]


async def test_no_more_continuations_at_once_than_they_have_places(world: World) -> None:
    _, measuring = await world.measured(continuations=6, concurrency=2)
    assert measuring.counts.continuations == 6 * 5 + 12 and world.engine.most_at_once == 2


async def test_what_is_not_played_in_time_is_not_known(world: World) -> None:
    world.engine.holds = "1-after1"  # the continuations after sample 1's first turn
    measuring = await world.played(continuations=2)
    found = {a.trajectory.sample_index: a for a in world.store.claim_unrewarded("monte_carlo")}
    assert await measuring.values(found[0].trajectory, within_s=20.0) == (0.75, [1.0, 1.0])
    assert await measuring.values(found[1].trajectory, within_s=3.0) == (0.75, [None, 0.0, 0.0])
    assert measuring.counts.continuations_unscored == 2
    assert measuring.slots.held == 0, "what was given up holds no place"


async def test_each_continuation_has_randomness_of_its_own(world: World) -> None:
    await world.measured(continuations=3, boundaries=1)
    continued = [each for each in world.engine.asked if "after" in each]
    assert len(set(continued)) == 3 * 3 + (2 + 3 + 3) * 2


@pytest.mark.parametrize("leaving", [False, True])
async def test_an_engine_that_dies_takes_the_worker_with_it_unless_it_leaves(
    world: World, monkeypatch: pytest.MonkeyPatch, leaving: bool
) -> None:
    async def die(*_: Any, **how: Any) -> Generated:
        raise EngineDied("gone")

    exits: list[int] = []
    monkeypatch.setattr("actors.monte_carlo.os._exit", exits.append)
    measuring = await world.played()
    monkeypatch.setattr(world.engine, "generate", die)
    if leaving:
        gone = asyncio.Event()
        gone.set()
        await measuring.run(gone)
    (awaited,) = world.store.claim_unrewarded("monte_carlo", limit=1)
    await measuring._reward(awaited)
    assert exits == ([] if leaving else [ENGINE_DIED])


def trajectory(*surprises: float) -> Trajectory:
    turns = []
    for surprise in surprises:
        turns += [Turn("policy", [1, 2], [-surprise] * 2, [0, 0]), Turn("tool", [3])]
    return Trajectory("t", "g000000", "task", 0, [1], [*turns, Turn("policy", [1], [-9.0], [0])])


def test_boundaries_are_spread_or_where_the_policy_was_unsure() -> None:
    sure = trajectory(0.1, 0.9, 0.2, 0.8, 0.3, 0.0)
    assert chosen_boundaries(sure, 9, "even") == [1, 2, 3, 4, 5, 6]
    assert chosen_boundaries(sure, 3, "even") == [2, 4, 6]
    assert chosen_boundaries(sure, 1, "even") == [4]
    assert chosen_boundaries(sure, 2, "uncertain") == [2, 4]
    assert chosen_boundaries(trajectory(), 3, "even") == []


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_the_groups_is_measured_and_whole_groups_only(share: float) -> None:
    drawn = [is_measured(f"g{index:06d}", share, "monte_carlo") for index in range(2000)]
    assert sum(drawn) / len(drawn) == pytest.approx(share, abs=0.04)
