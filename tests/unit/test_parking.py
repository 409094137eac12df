"""The places of a worker: bounded, given up by whoever waits long, given first to those that return."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from actors.parking import Slots

PARK_AFTER_S = 0.02


class Resources:
    def __init__(self) -> None:
        self.said: list[str] = []

    async def park(self) -> None:
        self.said.append("parked")

    def unpark(self) -> None:
        self.said.append("back")


class World:
    """Episodes that wait for a tool until they are told that it is done."""

    def __init__(self, total: int) -> None:
        self.slots = Slots(total, PARK_AFTER_S)
        self.done: dict[str, asyncio.Event] = {}
        self.order: list[str] = []
        self.episodes: dict[str, asyncio.Task[None]] = {}
        self.resources: dict[str, Resources] = {}
        self.most = 0

    def begin(self, name: str) -> None:
        self.done[name], self.resources[name] = asyncio.Event(), Resources()
        self.episodes[name] = asyncio.create_task(self._episode(name))

    async def _episode(self, name: str) -> None:
        async with self.slots.slot() as slot:
            self.order.append(f"{name} began")
            self.most = max(self.most, self.slots.held)
            assert await slot.wait(self._tool(name), self.resources[name]) == name
            self.order.append(f"{name} went on")
            self.most = max(self.most, self.slots.held)
            await asyncio.sleep(0)

    async def _tool(self, name: str) -> str:
        await self.done[name].wait()
        return name


async def until(there: Callable[[], Any]) -> None:
    async with asyncio.timeout(5):
        while not there():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def test_an_episode_that_waits_long_gives_its_place_up_and_has_one_again_when_it_goes_on():
    world = World(1)
    world.begin("a")
    await until(lambda: world.slots.parked == 1)
    assert (world.slots.held, world.resources["a"].said) == (0, ["parked"])
    world.begin("b")
    await until(lambda: world.slots.parked == 2)
    for name in "ab":
        world.done[name].set()
    await asyncio.gather(*world.episodes.values())
    assert world.order == ["a began", "b began", "a went on", "b went on"]
    assert (world.slots.held, world.slots.parked, world.slots.waiting, world.most) == (0, 0, 0, 1)
    assert world.resources["b"].said == ["parked", "back"]


async def test_an_episode_that_waits_for_a_moment_keeps_its_place():
    world = World(1)
    world.begin("a")
    await asyncio.sleep(0)
    world.done["a"].set()
    await world.episodes["a"]
    assert world.resources["a"].said == [] and world.order == ["a began", "a went on"]


async def test_those_that_return_go_before_those_that_begin_and_no_ticket_is_taken_meanwhile():
    world = World(2)
    world.begin("a")
    world.begin("b")
    await until(lambda: world.slots.parked == 2)
    assert world.slots.has_room(2)
    await world.slots.take()  # two that compute
    await world.slots.take()
    world.begin("new")
    await until(lambda: world.slots.waiting == 1)
    for name in "ba":  # in this order
        world.done[name].set()
        await until(lambda n=name: world.slots.waiting == {"b": 2, "a": 3}[n])
    assert not world.slots.has_room(1) and not await world.slots.room(1, timeout_s=0.01)
    world.done["new"].set()
    world.slots.give()
    await asyncio.gather(*world.episodes.values())
    assert world.order == ["a began", "b began", "b went on", "a went on", "new began", "new went on"]
    assert world.slots.held == 1 and world.most == 2
    assert await world.slots.room(1, timeout_s=1)


async def test_room_is_seen_as_soon_as_somebody_parks():
    world = World(4)
    for name in "abcd":
        world.begin(name)
    await asyncio.sleep(0)
    assert not world.slots.has_room(2)
    assert await world.slots.room(2, timeout_s=5)
    assert world.slots.parked > 0
    for episode in world.episodes.values():
        episode.cancel()
    await asyncio.gather(*world.episodes.values(), return_exceptions=True)
    assert (world.slots.held, world.slots.parked, world.slots.waiting) == (0, 0, 0)


async def test_a_group_larger_than_the_worker_begins_alone_and_runs_as_there_is_room():
    world = World(2)
    assert world.slots.has_room(5)
    for name in "abcde":
        world.begin(name)
        world.done[name].set()
    await asyncio.gather(*world.episodes.values())
    assert world.most == 2 and world.slots.held == 0


@pytest.mark.parametrize("when", ["beginning", "waiting", "parked", "returning"])
async def test_a_cancelled_episode_leaves_no_place_behind(when: str):
    world = World(1)
    if when == "beginning":
        await world.slots.take()
        world.begin("a")
        await until(lambda: world.slots.waiting)
    else:
        world.begin("a")
        await asyncio.sleep(0)
        if when in ("parked", "returning"):
            await until(lambda: world.slots.parked)
        if when == "returning":
            await world.slots.take()
            world.done["a"].set()
            await until(lambda: world.slots.waiting)
    world.episodes["a"].cancel()
    await asyncio.gather(world.episodes["a"], return_exceptions=True)
    taken = when in ("beginning", "returning")
    assert (world.slots.held, world.slots.parked, world.slots.waiting) == (int(taken), 0, 0)


async def test_what_a_tool_raises_reaches_the_episode_also_after_parking():
    slots = Slots(1, PARK_AFTER_S)

    async def fail() -> None:
        await asyncio.sleep(3 * PARK_AFTER_S)
        raise RuntimeError("the tool broke")

    with pytest.raises(RuntimeError, match="broke"):
        async with slots.slot() as slot:
            await slot.wait(fail(), Resources())
    assert (slots.held, slots.parked) == (0, 0)
