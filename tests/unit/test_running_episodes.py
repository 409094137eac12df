"""What a rollout worker reports of its episodes: real buffer and episodes, a script in place of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest

from actors.deliveries import SAVE_EVERY_S
from actors.engine import Generated
from actors.episode import EpisodeRunner
from actors.parking import Slots
from actors.replay import ReplaySettings, ReplayStore, Ticket
from actors.replay.records import sample_seed
from actors.running_episodes import RunningEpisodes
from actors.seat import Seat
from tests.episodes import ANSWER, CALL, LINES, TASK, Script, call, tiny
from toolrl import toolcalls
from toolrl.config import Named, RewardConfig, RolloutConfig, TaskConfig, ToolConfig
from toolrl.conversation import ChatFormat
from toolrl.rewards import RewardPipeline
from toolrl.tasks import AnswerChecker
from toolrl.tools import Toolbox, function_schema
from toolrl.trajectory import ToolResult, Trajectory

WAITING = f"{__name__}:Waiting"
WAIT = CALL.replace('"calculator"', '"waiting"')


class Waiting:
    """A user's tool whose calls return when the test says so."""

    name = "waiting"
    schema = function_schema("waiting", "Waits.", {"expression": "anything"})
    keeps_no_state = True
    may_return = asyncio.Event()

    def __init__(self, config: ToolConfig, interpreter: Any) -> None:
        self.timeout_s = 60.0

    @asynccontextmanager
    async def session(self, episode_id: str) -> AsyncIterator[Any]:
        yield self

    async def call(self, call: Any) -> ToolResult:
        await Waiting.may_return.wait()
        return ToolResult(call.id, call.name, "ok", "done")


@dataclass
class Engine:
    """Says the same turns in each episode; a turn waits for `may_go[turn]` where there is one."""

    turns: list[str]
    version: int = 0
    may_go: dict[int, asyncio.Event] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def generate(self, prompt_ids: list[int], *, request_id: str, **how: Any) -> Generated:
        turn = int(request_id.rpartition("-")[2])
        self.asked.append(request_id)
        if turn in self.may_go:
            await self.may_go[turn].wait()
        return await Script([self.turns[turn]], version=self.version).generate(prompt_ids, request_id=request_id, **how)


class Remote:
    """The buffer as a worker sees it: calls go to the store in the order in which they are made."""

    def __init__(self, store: ReplayStore) -> None:
        self.store = store

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        class Call:
            @staticmethod
            def remote(*arguments: Any) -> asyncio.Future[Any]:
                done = asyncio.get_running_loop().create_future()
                done.set_result(method(*arguments))
                return done

        return Call


class Tasks:
    def task(self, index: int) -> Any:
        return TASK


@dataclass
class World:
    store: ReplayStore
    checker: AnswerChecker

    def runner(self, engine: Engine) -> EpisodeRunner:
        toolbox = Toolbox.build([ToolConfig("calculator"), ToolConfig(LINES), ToolConfig(WAITING)], None, 0)
        parser = toolcalls.get("hermes")
        return EpisodeRunner(
            engine,
            ChatFormat(tiny(), tools=toolbox.schemas, parser=parser),
            parser,
            toolbox,
            RewardPipeline(RewardConfig([Named("outcome")]), self.checker),
            RolloutConfig(max_turn_tokens=200, max_response_tokens=1000, max_context_tokens=2000),
            tokenizer=tiny(),
            answer="boxed",
        )

    def worker(
        self, name: str, engine: Engine, max_staleness: int = 3, runner: EpisodeRunner | None = None
    ) -> RunningEpisodes:
        return RunningEpisodes(
            name,
            runner or self.runner(engine),
            Tasks(),  # type: ignore[arg-type]
            Remote(self.store),
            Slots(8, park_after_s=1.0),
            version=lambda: engine.version,
            max_staleness=max_staleness,
        )

    def ticket(self, worker: str) -> Ticket:
        ticket = self.store.lease_ticket(worker)
        assert ticket is not None
        return ticket

    def trained(self) -> list[Trajectory]:
        batch = self.store.lease_batch("learner", 1, 0)
        assert batch is not None
        return [member for group in batch.trajectories() for member in group]


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    Waiting.may_return = asyncio.Event()
    settings = ReplaySettings(group_size=2, batch_groups=1, max_staleness=3, drop_uniform_groups=False)
    store = ReplayStore(tmp_path / "ledger.sqlite", settings)
    async with AnswerChecker(TaskConfig()) as checker:
        world = World(store, checker)
        yield world
    assert world.store.ledger().balances and world.store.audit() == []
    world.store.close()


async def settled(worker: RunningEpisodes) -> None:
    await asyncio.wait_for(asyncio.gather(*worker.episodes), 10)


async def until(condition: Any) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 a condition of plain objects
            await asyncio.sleep(0.01)


async def test_episodes_handed_back_in_mid_turn_go_on_at_a_peer(world: World) -> None:
    leaving = Engine([CALL, CALL, ANSWER], may_go={1: asyncio.Event()})
    one = world.worker("one", leaving)
    one.begin(world.ticket("one"))
    await until(lambda: sum(each.endswith("-1") for each in leaving.asked) == 2)  # both in their second turn
    assert await one.hand_back(grace_s=0.05) == 2  # the turns do not end by then: dropped
    assert world.store.ledger().waiting == 2 and one.group_ids == []

    staying = Engine([CALL, CALL, ANSWER])
    two = world.worker("two", staying)
    ticket = world.ticket("two")
    assert ticket.attempts == {0: 1, 1: 1}  # handed over is no failed try
    assert {len(progress.turns) for progress in ticket.progress.values()} == {2}
    two.begin(ticket)
    await settled(two)
    assert sorted(each.rpartition("-")[2] for each in staying.asked) == ["1", "1", "2", "2"]
    trained = world.trained()
    assert [t.metadata["continued_after"] for t in trained] == [[1], [1]]
    assert [t.metadata["worker"] for t in trained] == ["two", "two"]
    assert two.counts.continued_episodes == two.counts.finished_episodes == 2
    assert world.store.ledger().outcomes == {"answered": 2}


async def test_a_turn_that_ends_within_the_grace_is_kept_and_no_other_is_begun(world: World) -> None:
    engine = Engine([CALL, CALL, ANSWER], may_go={1: asyncio.Event()})
    one = world.worker("one", engine)
    one.begin(world.ticket("one"))
    await until(lambda: len(engine.asked) == 4)
    leaving = asyncio.create_task(one.hand_back(grace_s=5.0))
    await asyncio.sleep(0.05)
    engine.may_go[1].set()
    assert await leaving == 2 and len(engine.asked) == 4
    progress = world.ticket("two").progress
    assert [len(trajectory.turns) for trajectory in progress.values()] == [3, 3]  # its calls are run elsewhere
    assert all(trajectory.turns[-1].kind == "policy" for trajectory in progress.values())


async def test_what_ends_within_the_grace_is_delivered_and_not_handed_back(world: World) -> None:
    engine = Engine([CALL, ANSWER], may_go={1: asyncio.Event()})
    one = world.worker("one", engine)
    one.begin(world.ticket("one"))
    await until(lambda: len(engine.asked) == 4)
    leaving = asyncio.create_task(one.hand_back(grace_s=5.0))
    await asyncio.sleep(0.05)
    engine.may_go[1].set()
    assert await leaving == 0
    assert world.store.ledger().ready == 2


async def test_episodes_in_their_first_turn_are_begun_anew_elsewhere(world: World) -> None:
    engine = Engine([ANSWER], may_go={0: asyncio.Event()})
    one = world.worker("one", engine)
    one.begin(world.ticket("one"))
    await until(lambda: len(engine.asked) == 2)
    assert await one.hand_back(grace_s=0.0) == 2
    ticket = world.ticket("two")
    assert ticket.progress == {} and ticket.samples_missing == [0, 1]


async def test_a_policy_turn_is_saved_before_a_slow_tool_returns(world: World) -> None:
    one = world.worker("one", Engine([WAIT, ANSWER]))
    one.begin(world.ticket("one"))
    await asyncio.sleep(SAVE_EVERY_S + 0.2)
    world.store.release_worker("one")  # killed, as far as the buffer can tell
    progress = world.ticket("two").progress
    assert [[turn.kind for turn in trajectory.turns] for trajectory in progress.values()] == [["policy"]] * 2
    one.cancel(one.group_ids)
    await asyncio.gather(*one.episodes, return_exceptions=True)
    two = world.worker("two", Engine([WAIT, ANSWER]))
    Waiting.may_return.set()
    ticket = Ticket("g000000", 0, 2, [0, 1], {0: 2, 1: 2}, {0: 1, 1: 2}, 0, {n: progress[n] for n in (0, 1)})
    two.begin(ticket)
    await settled(two)
    assert [len(t.turns) for t in world.trained()] == [3, 3]


async def test_an_episode_that_no_learner_may_train_on_ends_as_stale_and_is_issued_again(world: World) -> None:
    engine = Engine([CALL, CALL, ANSWER], may_go={1: asyncio.Event()})
    one = world.worker("one", engine, max_staleness=3)
    one.begin(world.ticket("one"))
    await until(lambda: len(engine.asked) == 4)
    engine.version = 4  # four publications later: the first turn's tokens are beyond the bound
    engine.may_go[1].set()
    await settled(one)
    assert len(engine.asked) == 4  # no third turn
    ledger = world.store.ledger()
    assert ledger.reissued == {"stale": 2} and ledger.waiting == 2
    assert world.ticket("one").progress == {}


async def test_progress_beyond_the_bound_is_not_handed_out(world: World) -> None:
    engine = Engine([CALL, ANSWER], may_go={1: asyncio.Event()})
    one = world.worker("one", engine)
    one.begin(world.ticket("one"))
    await until(lambda: len(engine.asked) == 4)
    assert await one.hand_back(grace_s=0.0) == 2
    for version in range(1, 5):
        world.store.set_version(version)
    ticket = world.ticket("two")
    assert ticket.progress == {} and ticket.samples_missing == [0, 1]
    assert world.store.ledger().puts["progress_too_old"] == 2


async def test_a_lease_that_was_lost_ends_its_episodes_and_reports_nothing(world: World) -> None:
    engine = Engine([CALL, ANSWER], may_go={1: asyncio.Event()})
    one = world.worker("one", engine)
    one.begin(world.ticket("one"))
    await until(lambda: len(engine.asked) == 4)
    one.cancel(one.group_ids)
    await asyncio.gather(*one.episodes, return_exceptions=True)
    await asyncio.sleep(0)
    assert one.group_ids == [] and one.counts.finished_episodes == 0 and one._boundaries == {}


@pytest.mark.parametrize(("sampled_by", "goes_on"), [(0, True), (1, False)])
async def test_a_resumed_run_goes_on_with_what_weights_sampled_that_its_checkpoint_knows(
    world: World, tmp_path: Path, sampled_by: int, goes_on: bool
) -> None:
    engine = Engine([CALL, CALL, ANSWER], version=sampled_by, may_go={1: asyncio.Event()})
    one = world.worker("one", engine)
    one.begin(world.ticket("one"))
    await until(lambda: len(engine.asked) == 4)
    await asyncio.sleep(SAVE_EVERY_S + 0.2)
    world.store.close()  # the driver is killed: no farewell
    again = World(ReplayStore(tmp_path / "ledger.sqlite", world.store.settings), world.checker)
    again.store.rollback_to(0, 0)
    ticket = again.ticket("two")
    assert ticket.samples_missing == [0, 1] and ticket.attempts == {0: 1, 1: 1}
    assert (sorted(ticket.progress) == [0, 1]) is goes_on
    two = again.worker("two", Engine([CALL, CALL, ANSWER]))
    two.begin(ticket)
    await settled(two)
    assert [t.metadata.get("continued_after") for t in again.trained()] == [[1] if goes_on else None] * 2
    one.cancel(one.group_ids)
    await asyncio.gather(*one.episodes, return_exceptions=True)
    world.store = again.store


@dataclass
class Hasty(Engine):
    """Takes a random moment for each turn; what it says depends on the seed and the turn, as an engine's words do."""

    random: Random = field(default_factory=Random)

    async def generate(self, prompt_ids: list[int], *, request_id: str, **how: Any) -> Generated:
        await asyncio.sleep(self.random.random() * 0.01)
        turn = int(request_id.rpartition("-")[2])
        said = call(f"{how['seed']} + {turn}") if turn < 3 else ANSWER  # a wrong one would start a verifier
        return await Script([said], version=self.version).generate(prompt_ids, request_id=request_id, **how)


@pytest.mark.parametrize("seed", range(4))
async def test_whoever_leaves_or_dies_no_episode_is_lost_and_none_comes_twice(tmp_path: Path, seed: int) -> None:
    random, groups, gone = Random(seed), 8, 0
    settings = ReplaySettings(
        group_size=3,
        batch_groups=groups,
        max_staleness=0,
        max_attempts=99,
        drop_uniform_groups=False,
        total_groups=groups,
    )
    store, names = ReplayStore(tmp_path / "ledger.sqlite", settings), (f"w{number}" for number in range(1000))
    async with AnswerChecker(TaskConfig()) as checker, asyncio.timeout(60):
        world, engine = World(store, checker), Hasty([], random=random)
        runner = world.runner(engine)
        workers = [world.worker(next(names), engine, runner=runner) for _ in range(2)]
        while store.ledger().ready < groups * settings.group_size:
            worker = random.choice(workers)
            if len(worker.episodes) < 6 and (ticket := store.lease_ticket(worker.worker)) is not None:
                worker.begin(ticket)
            await asyncio.sleep(random.random() * 0.006)
            assert store.ledger().balances and store.audit() == []
            if random.random() < 0.3:
                gone += 1
                workers.remove(worker)
                workers.append(world.worker(next(names), engine, runner=runner))
                if random.random() < 0.5:
                    await worker.hand_back(grace_s=random.choice([0.0, 0.002, 0.1]))
                    assert store.release_worker(worker.worker) == []  # it holds nothing any more
                else:  # killed
                    worker.cancel(worker.group_ids)
                    await asyncio.gather(*worker.episodes, return_exceptions=True)
                    store.release_worker(worker.worker)
        batch = store.lease_batch("learner", groups, 0)
        assert batch is not None
        trained = [member for group in batch.trajectories() for member in group]
        assert [t.id for t in trained] == [f"g{group:06d}.{sample}" for group in range(groups) for sample in range(3)]
        assert gone > 2 and any("continued_after" in t.metadata for t in trained)
        for number, trajectory in enumerate(trained):  # as if nothing had happened
            seat = Seat(trajectory.group_id, trajectory.sample_index, sample_seed(0, number // 3, number % 3))
            expected = await runner.run(TASK, seat)
            assert [turn.token_ids for turn in trajectory.turns] == [turn.token_ids for turn in expected.turns]
            assert (trajectory.outcome, trajectory.reward) == (expected.outcome, expected.reward)
    store.close()
