"""The driver's end where weights come over a group: they lie in no memory until somebody needs them there."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.weights.channel import WeightChannel
from actors.weights.publication import Publication


class Engine:
    """Takes what it is given, unless `error`."""

    def __init__(self) -> None:
        self.taken: list[int] = []
        self.error: Exception | None = None

    async def take(self, given: Publication) -> dict[str, Any]:
        assert given.in_memory
        if self.error is not None:
            raise self.error
        self.taken.append(given.version)
        return {"version": given.version}


class Learner:
    """Provides its latest version when it does not train."""

    def __init__(self, channel: WeightChannel) -> None:
        self.version = 0
        self.rests = asyncio.Event()
        self.rests.set()
        self.provided: list[int] = []
        self.channel = channel
        channel.provide = self.provide

    async def provide(self) -> Publication:
        await self.rests.wait()
        await asyncio.sleep(0)
        self.provided.append(self.version)
        return Publication(self.version, ())

    def send(self, *names: str) -> Any:
        self.version += 1
        self.rests.set()
        applied = {name: {"version": self.version} for name in names}
        return self.channel.sent(Publication(self.version, (), in_memory=False), applied, {"c": "no answer"})


@pytest.fixture
async def channel() -> WeightChannel:
    return WeightChannel(deadline_s=2)


async def test_engines_of_the_group_are_up_to_date_and_nothing_is_put_into_memory(channel: WeightChannel) -> None:
    learner, engines = Learner(channel), {"a": Engine(), "b": Engine()}
    for name, engine in engines.items():
        await channel.join(name, engine.take)
    assert channel.up_to_date() == ["a", "b"]
    delivery = learner.send("a", "b")
    assert (delivery.version, list(delivery.applied), delivery.behind) == (1, ["a", "b"], {})
    assert (channel.up_to_date(), channel.behind, learner.provided) == (["a", "b"], {}, [])


async def test_who_was_not_in_the_group_is_given_them_through_memory_at_once(channel: WeightChannel) -> None:
    learner, c = Learner(channel), Engine()
    await channel.join("a", Engine().take)
    await channel.join("c", c.take)
    delivery = learner.send("a")
    assert (list(delivery.applied), delivery.behind) == (["a"], {"c": "no answer"})
    assert channel.up_to_date() == ["a"]
    await asyncio.sleep(0.05)
    assert (c.taken, channel.behind, channel.up_to_date()) == ([1], {}, ["a", "c"])


async def test_who_joins_while_the_learner_trains_waits_for_its_next_version(channel: WeightChannel) -> None:
    learner, late = Learner(channel), Engine()
    await channel.join("a", Engine().take)
    learner.send("a")
    learner.rests.clear()
    joining = asyncio.create_task(channel.join("late", late.take))
    await asyncio.sleep(0.05)
    assert not joining.done() and channel.up_to_date() == ["a"]
    learner.send("a")
    await asyncio.wait_for(joining, 1)
    assert (late.taken, channel.behind, channel.up_to_date()) == ([2], {}, ["a", "late"])


async def test_who_joins_while_others_are_sent_a_version_waits_for_a_learner_that_trains_without_a_deadline() -> None:
    channel, late = WeightChannel(deadline_s=0.2), Engine()
    learner = Learner(channel)
    await channel.join("a", Engine().take)
    learner.send("a")

    async def take(given: Publication) -> dict[str, Any]:
        if given.version == 1:  # at this very moment the next is sent, and the learner trains on
            learner.send("a")
            learner.rests.clear()
        return await late.take(given)

    joining = asyncio.create_task(channel.join("late", take))
    await asyncio.sleep(0.4)
    assert not joining.done()
    learner.send("a")
    await asyncio.wait_for(joining, 1)
    assert (late.taken, channel.behind) == ([1, 3], {})


async def test_several_that_need_the_weights_have_them_put_into_memory_once(channel: WeightChannel) -> None:
    learner = Learner(channel)
    await channel.join("a", Engine().take)
    learner.send("a")
    await asyncio.gather(*(channel.join(f"late-{n}", Engine().take) for n in range(4)))
    assert learner.provided == [1] and len(channel.up_to_date()) == 5


async def test_an_engine_that_errs_through_memory_stays_out_of_the_group_until_it_has_caught_up(
    channel: WeightChannel,
) -> None:
    learner, c = Learner(channel), Engine()
    await channel.join("a", Engine().take)
    await channel.join("c", c.take)
    c.error = RuntimeError("asleep")
    learner.send("a")
    await asyncio.sleep(0.05)
    assert (channel.up_to_date(), list(channel.behind)) == (["a"], ["c"])
    c.error = None
    assert channel.retry() == ["c"]
    await asyncio.sleep(0.05)
    assert channel.up_to_date() == ["a", "c"]


async def test_without_a_learner_that_provides_them_it_is_an_error(channel: WeightChannel) -> None:
    channel.sent(Publication(1, (), in_memory=False), {}, {})
    with pytest.raises(RuntimeError, match="weights 1 lie in no memory"):
        await channel.join("a", Engine().take)
