"""Episodes that go on: sampled by one real engine, taken up by another, with real interpreters. What comes out is what the
first would have made alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from tests.requirements import need

need("vllm")

from transformers import AutoTokenizer

from actors.continuation import prefix_of
from actors.engine import Engine
from actors.episode import EpisodeRunner
from actors.seat import Seat
from sandbox import SandboxConfig, SandboxPool
from tests.integration import tiny_engines
from tests.integration.eager_policy import CALLS, Eager, RestlessEager, write_eager_model
from toolrl.config import Named, RewardConfig, RolloutConfig, TaskConfig, ToolConfig
from toolrl.conversation import ChatFormat
from toolrl.rewards import RewardPipeline
from toolrl.tasks import AnswerChecker, Task
from toolrl.tools import Toolbox
from toolrl.trajectory import Outcome, Trajectory
from toolrl.trajectory_codec import decode, encode

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

TASK = Task("t0", "products", [{"role": "user", "content": "17 * 24?"}], "408", "math")
SEATS = [Seat(f"g{index}", index, seed=100 + index) for index in range(6)]
BRANCH = Seat("branch", 0, seed=7)


@dataclass
class Place:
    """What an episode runs on."""

    engine: Engine
    sandbox: SandboxPool
    tokenizer: Any
    checker: AnswerChecker

    async def play(
        self, seat: Seat, *, parser: Any = None, progress: Trajectory | None = None, **limits: Any
    ) -> Trajectory:
        parser = parser or Eager()
        settings = {
            "max_turn_tokens": 60,
            "max_response_tokens": 400,
            "max_context_tokens": tiny_engines.CONTEXT,
            **limits,
        }
        toolbox = Toolbox.build([ToolConfig("python", failure_rate=0.3)], self.sandbox, seed=0)
        chat = ChatFormat(self.tokenizer, tools=toolbox.schemas, parser=parser)
        rewards = RewardPipeline(RewardConfig([Named("outcome")]), self.checker)
        runner = EpisodeRunner(
            self.engine,
            chat,
            parser,
            toolbox,
            rewards,
            RolloutConfig(**settings),
            tokenizer=self.tokenizer,
            answer="boxed",
        )
        # As it comes out of the buffer.
        return await runner.run(TASK, seat, progress=None if progress is None else decode(encode(progress)))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def places(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Place, Place]]:
    """Two engines on the same weights."""
    folder = tmp_path_factory.mktemp("models") / "eager"
    write_eager_model(folder, 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    first = await tiny_engines.engine(folder, "first")
    second = await tiny_engines.engine(folder, "second")
    config = SandboxConfig(backend="process", min_sessions=2, max_sessions=12)
    async with SandboxPool(config) as sandbox, AnswerChecker(TaskConfig()) as checker:
        yield Place(first, sandbox, tokenizer, checker), Place(second, sandbox, tokenizer, checker)
    await first.stop()
    await second.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def originals(places: tuple[Place, Place]) -> list[Trajectory]:
    """Episodes of several turns, played in one go."""
    played = await asyncio.gather(*(places[0].play(seat) for seat in SEATS))
    several = [trajectory for trajectory in played if len(trajectory.policy_turns) > 2]
    assert len(several) >= 3, [(t.outcome, t.limit, len(t.turns)) for t in played]
    assert any(len(trajectory.policy_turns) == CALLS + 1 for trajectory in several)
    assert any(result.injected for t in several for turn in t.turns for result in turn.results)
    return several


def seat_of(trajectory: Trajectory) -> Seat:
    return next(seat for seat in SEATS if seat.trajectory_id == trajectory.id)


def sampled(trajectory: Trajectory) -> list[Any]:
    return [(turn.kind, turn.token_ids, turn.weight_versions, turn.finish_reason) for turn in trajectory.turns]


def seen(trajectory: Trajectory) -> list[Any]:
    return [(r.call_id, r.status, r.text, r.injected) for turn in trajectory.turns for r in turn.results]


async def test_a_continued_episode_is_the_uninterrupted_one_token_by_token(
    places: tuple[Place, Place], originals: list[Trajectory]
) -> None:
    jobs = [(original, done) for original in originals for done in range(1, len(original.policy_turns))]
    played = await asyncio.gather(
        *(places[1].play(seat_of(original), progress=prefix_of(original, done)) for original, done in jobs)
    )
    for (original, done), episode in zip(jobs, played, strict=True):
        assert sampled(episode) == sampled(original), (original.id, done)
        assert seen(episode) == seen(original)  # cells that read variables and files of the cells before
        assert (episode.outcome, episode.limit, episode.rewards) == (original.outcome, original.limit, original.rewards)
        prefix = 2 * done
        assert [t.logprobs for t in episode.turns[:prefix]] == [t.logprobs for t in original.turns[:prefix]]
        for mine, theirs in zip(episode.turns[prefix:], original.turns[prefix:], strict=True):
            assert tiny_engines.gap(mine.logprobs, theirs.logprobs) < tiny_engines.TOLERANCE
        assert episode.metadata["continued_after"] == [done] and "replay_changed" not in episode.metadata
        assert episode.timings["replay_s"] > 0


async def test_calls_that_were_asked_for_and_not_run_are_run_by_the_next(
    places: tuple[Place, Place], originals: list[Trajectory]
) -> None:
    original = originals[0]
    progress = prefix_of(original, 2)
    progress.turns.pop()
    episode = await places[1].play(seat_of(original), progress=progress)
    assert sampled(episode) == sampled(original) and seen(episode) == seen(original)


async def test_branches_share_the_prefix_and_nothing_else(
    places: tuple[Place, Place], originals: list[Trajectory]
) -> None:
    original = max(originals, key=lambda trajectory: len(trajectory.turns))
    branch, again = await asyncio.gather(*(place.play(BRANCH, progress=prefix_of(original, 2)) for place in places))
    assert sampled(branch)[:4] == sampled(original)[:4]
    assert branch.turns[4].token_ids != original.turns[4].token_ids
    assert sampled(branch) == sampled(again)  # by its own seed, on any worker
    assert seen(branch)[:2] == seen(original)[:2]
    last = [result for result in seen(branch)[2:] if result[1] == "ok"]
    assert all("NameError" not in result[2] for result in last)


async def test_a_cell_that_gives_something_else_is_found(places: tuple[Place, Place]) -> None:
    parser = RestlessEager()
    for seat in SEATS:
        original = await places[0].play(seat, parser=parser, max_response_tokens=500)
        ran = [not turn.results[0].injected for turn in original.turns if turn.kind == "tool"]
        if len(ran) >= 2 and ran[1]:
            break
    else:
        raise AssertionError("no episode ran its second cell")
    how = {"parser": parser, "progress": prefix_of(original, 2), "max_response_tokens": 500}
    refused = await places[1].play(seat, on_changed_replay="refuse", **how)
    assert (refused.outcome, len(refused.policy_turns)) == (Outcome.CANCELLED, 2)
    (change,) = refused.metadata["replay_changed"]
    assert change["turn"] == 3 and change["recorded"] != change["replayed"]

    accepted = await places[1].play(seat, on_changed_replay="accept", **how)
    assert sampled(accepted)[:4] == sampled(original)[:4] and accepted.outcome is not Outcome.CANCELLED

    over = await places[1].play(seat, on_changed_replay="restart", **how)
    assert sampled(over)[:3] == sampled(original)[:3]  # the same seat and weights, from the beginning
    assert seen(over)[1] != seen(original)[1]
    assert "continued_after" not in over.metadata and over.metadata["replay_changed"]
