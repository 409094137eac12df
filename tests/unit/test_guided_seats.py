"""Seats that supervision fills: real buffer, references and episodes, a script in place of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from actors.guided_seats import GuidedSeats
from actors.replay import ReplaySettings, ReplayStore, Ticket
from actors.running_episodes import RunningEpisodes
from tests.episodes import ANSWER, CALL, QUESTION, SEAT, TASK
from tests.unit.test_running_episodes import Engine, Remote, World, settled, until
from toolrl.config import TaskConfig
from toolrl.config_supervision import HintConfig, OffPolicyConfig, SupervisionConfig
from toolrl.supervision import References
from toolrl.supervision.guidance import guided_by
from toolrl.supervision.hints import hinted_task, without_hint
from toolrl.tasks import AnswerChecker
from toolrl.trajectory import NOT_SAMPLED, Trajectory

SIZE = 4
HINT = "Call first."
BOTH = SupervisionConfig(off_policy=OffPolicyConfig(per_group=1), hint=HintConfig(per_group=1, text=HINT))


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    settings = ReplaySettings(group_size=SIZE, batch_groups=1, max_staleness=3, drop_uniform_groups=False)
    store = ReplayStore(tmp_path / "ledger.sqlite", settings)
    async with AnswerChecker(TaskConfig()) as checker:
        yield World(store, checker)
    assert store.ledger().balances and store.audit() == []
    store.close()


async def shelf(world: World) -> References:
    found = References()
    found.keep([await world.runner(Engine([CALL, ANSWER])).run(TASK, SEAT)])
    return found


def guided(world: World, engine: Any, config: SupervisionConfig, references: References | None) -> RunningEpisodes:
    handle = None if references is None else Remote(references)  # type: ignore[arg-type]
    return world.worker("one", engine, runner=GuidedSeats(world.runner(engine), config, SIZE, handle))  # type: ignore[arg-type]


class Watched(Engine):
    """Remembers the prompts by trajectory."""

    async def generate(self, prompt_ids: list[int], *, request_id: str, **how: Any) -> Any:
        self.__dict__.setdefault("prompts", {}).setdefault(request_id.rpartition("-")[0], list(prompt_ids))
        return await super().generate(prompt_ids, request_id=request_id, **how)


def prompt(world: World, messages: list[dict[str, Any]] = QUESTION) -> list[int]:
    return world.runner(Engine([])).chat.prompt_ids(messages)


async def played(world: World, worker: RunningEpisodes) -> tuple[Ticket, list[Trajectory]]:
    ticket = world.ticket("one")
    worker.begin(ticket)
    await settled(worker)
    return ticket, world.trained()


async def test_a_group_gets_own_samples_a_hinted_one_and_a_reference_that_nobody_generates(world: World) -> None:
    engine = Watched([ANSWER])
    ticket, group = await played(world, guided(world, engine, BOTH, await shelf(world)))
    assert [guided_by(member) for member in group] == [None, None, "hint", "reference"]
    with_hint = prompt(world, hinted_task(TASK, HINT).messages)
    bare = prompt(world)
    assert engine.prompts == {f"{ticket.group_id}.{seat}": bare if seat < 2 else with_hint for seat in range(3)}
    assert [member.prompt_ids for member in group] == [bare, bare, with_hint, bare], "recorded as the model saw it"
    assert [without_hint(member).prompt_ids for member in group] == [bare] * 4
    assert [member.rewards for member in group] == [{"outcome": 1.0}] * 4, "the reference is scored like the others"
    assert len(group[3].policy_turns) == 2 and group[3].id == f"{ticket.group_id}.3"
    assert {v for turn in group[3].policy_turns for v in turn.weight_versions} == {NOT_SAMPLED}


async def test_the_account_holds_the_reference_as_the_sample_whose_seat_it_takes(world: World) -> None:
    worker = guided(world, Engine([ANSWER]), BOTH, await shelf(world))
    await played(world, worker)
    ledger = world.store.ledger()
    assert (ledger.issued, ledger.leased, ledger.trained) == (SIZE, SIZE, 0)
    assert ledger.outcomes == {"answered": SIZE} and ledger.puts == {"accepted": SIZE}
    assert worker.counts.sampled_tokens == 3 * len(world.runner(Engine([])).tokenizer(ANSWER).input_ids)
    assert world.store.ack(1, 1, 1)
    assert world.store.ledger().trained == SIZE


async def test_a_reference_stays_when_the_samples_beside_it_are_too_old(world: World) -> None:
    worker = guided(world, Engine([ANSWER]), BOTH, await shelf(world))
    worker.begin(world.ticket("one"))
    await settled(worker)
    world.store.set_version(4)
    assert world.store.lease_batch("learner", 1, 4) is None
    again = world.ticket("one")
    assert again.samples_missing == [0, 1, 2], "sampled by weights 0, four versions ago"


async def test_a_task_without_a_reference_is_played_as_any_other(world: World) -> None:
    for references in (References(), None):
        engine = Watched([ANSWER])
        _, group = await played(world, guided(world, engine, BOTH, references))
        assert len(engine.prompts) == SIZE
        assert [guided_by(member) for member in group] == [None, None, "hint", None]
        world.store.ack(1 if references is not None else 2, 1, 0)


async def test_an_answer_that_is_not_known_is_not_hinted_at(world: World) -> None:
    config = SupervisionConfig(hint=HintConfig(per_group=1, text="It is {answer}."))
    engine = Watched([ANSWER])
    _, group = await played(world, guided(world, engine, config, None))
    assert group[3].prompt_ids == prompt(world, hinted_task(TASK, "It is 408.").messages)
    assert hinted_task(TASK, "It is {answer}.").messages[0]["content"].endswith("It is 408.")


async def test_a_hinted_episode_that_goes_on_elsewhere_keeps_its_hint_and_loses_it_for_the_update(world: World) -> None:
    leaving = Engine([CALL, ANSWER], may_go={1: asyncio.Event()})
    config = SupervisionConfig(hint=HintConfig(per_group=2, text=HINT))
    one = guided(world, leaving, config, None)
    one.begin(world.ticket("one"))
    await until(lambda: sum(each.endswith("-1") for each in leaving.asked) == SIZE)
    assert await one.hand_back(grace_s=0.05) == SIZE
    # The other worker hints at fewer: what was begun with a hint is none the less trained without it.
    config.hint.per_group = 1
    two = guided(world, Engine([CALL, ANSWER]), config, None)
    _, group = await played(world, two)
    assert [guided_by(member) for member in group] == [None, None, "hint", "hint"]
    assert all(member.metadata["continued_after"] == [1] for member in group)
    with_hint = prompt(world, hinted_task(TASK, HINT).messages)
    assert [member.prompt_ids == with_hint for member in group] == [False, False, True, True]
    assert [without_hint(member).prompt_ids for member in group] == [prompt(world)] * SIZE
    assert len({tuple(without_hint(member).response_ids) for member in group}) == 1
