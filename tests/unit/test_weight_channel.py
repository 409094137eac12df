"""The driver's end of the weight channel: deadlines, names, catching up. Engines here are coroutines, not Ray actors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.weights.channel import WeightChannel, WeightsBehind
from actors.weights.publication import Publication


def publication(version: int) -> Publication:
    return Publication(version, ())


class Engine:
    """Takes what it is given once `gate` is open, and remembers it."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.taken: list[int] = []
        self.error: Exception | None = None
        self.fails_once: Exception | None = None

    async def take(self, given: Publication) -> dict[str, Any]:
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        once, self.fails_once = self.fails_once, None
        if once is not None:
            raise once
        self.taken.append(given.version)
        return {"version": given.version}


async def test_every_engine_takes_a_publication() -> None:
    channel, engines = WeightChannel(deadline_s=5), {"a": Engine(), "b": Engine()}
    for name, engine in engines.items():
        await channel.join(name, engine.take)
    delivery = (await channel.publish(publication(1))).require_all()
    assert delivery.applied == {"a": {"version": 1}, "b": {"version": 1}}
    assert channel.behind == {}


async def test_an_engine_that_never_answers_is_named_by_the_deadline() -> None:
    channel, good, silent = WeightChannel(deadline_s=0.05), Engine(), Engine()
    await channel.join("good", good.take)
    await channel.join("silent", silent.take)
    silent.gate.clear()
    delivery = await asyncio.wait_for(channel.publish(publication(1)), 2)
    assert (list(delivery.applied), channel.behind) == (["good"], {"silent": None})
    with pytest.raises(WeightsBehind, match=r"weights 1 .* silent: no answer in 0\.05 s"):
        delivery.require_all()
    channel.close()


async def test_a_late_engine_gets_the_latest_once_it_answers_and_none_in_between() -> None:
    channel, late = WeightChannel(deadline_s=0.02), Engine()
    await channel.join("late", late.take)
    late.gate.clear()
    for version in (1, 2, 3):
        assert "late" in (await channel.publish(publication(version))).behind
    late.gate.set()
    await asyncio.sleep(0.05)
    assert (late.taken, channel.behind) == ([1, 3], {})


async def test_an_engine_that_errs_is_named_and_tried_again_with_the_next() -> None:
    channel, engine = WeightChannel(deadline_s=5), Engine()
    await channel.join("a", engine.take)
    engine.error = RuntimeError("checksum of embed is wrong")
    with pytest.raises(WeightsBehind, match=r"a: RuntimeError: checksum of embed is wrong"):
        (await channel.publish(publication(1))).require_all()
    assert channel.behind == {"a": None}
    engine.error = None
    assert (await channel.publish(publication(2))).applied == {"a": {"version": 2}}
    assert channel.behind == {}


async def test_an_engine_that_failed_on_a_version_that_is_not_the_latest_is_given_the_latest() -> None:
    channel, engine = WeightChannel(deadline_s=0.05), Engine()
    await channel.join("a", engine.take)
    engine.gate.clear()
    await channel.publish(publication(1))
    late = asyncio.create_task(channel.publish(publication(2)))
    await asyncio.sleep(0.01)
    engine.fails_once = RuntimeError("version 1 has been overwritten")
    engine.gate.set()
    assert (await late).applied == {"a": {"version": 2}}
    assert (engine.taken, channel.behind) == ([2], {})


async def test_an_engine_that_erred_is_tried_again_without_a_new_version_and_not_for_ever() -> None:
    channel, once, always, silent = WeightChannel(deadline_s=0.05), Engine(), Engine(), Engine()
    for name, engine in {"once": once, "always": always, "silent": silent}.items():
        await channel.join(name, engine.take)
    once.error = always.error = RuntimeError("out of memory")
    silent.gate.clear()
    await channel.publish(publication(1))
    assert set(channel.behind) == {"once", "always", "silent"}
    once.error = None
    assert channel.retry() == ["once", "always"]  # the silent one still has its first try
    await asyncio.sleep(0.02)
    assert once.taken == [1] and set(channel.behind) == {"always", "silent"}
    assert channel.retry() == ["always"]
    await asyncio.sleep(0.02)
    assert channel.retry() == []
    await channel.publish(publication(2))
    assert channel.retry() == ["always"]  # a new version is tried anew
    channel.close()


async def test_an_engine_that_joins_has_the_latest_weights_first() -> None:
    channel, first, second = WeightChannel(deadline_s=5), Engine(), Engine()
    await channel.join("first", first.take)
    await channel.publish(publication(1))
    await channel.publish(publication(2))
    await channel.join("second", second.take)
    assert (first.taken, second.taken) == ([1, 2], [2])


async def test_an_engine_that_does_not_take_them_does_not_join() -> None:
    channel, engine = WeightChannel(deadline_s=0.02), Engine()
    await channel.publish(publication(1))
    engine.gate.clear()
    with pytest.raises(WeightsBehind, match="deaf: no answer"):
        await channel.join("deaf", engine.take)
    assert channel.behind == {}
    assert (await channel.publish(publication(2))).behind == {}


async def test_one_that_left_is_given_nothing_more() -> None:
    channel, engine = WeightChannel(deadline_s=5), Engine()
    await channel.join("a", engine.take)
    channel.leave("a")
    assert (await channel.publish(publication(1))).applied == {}
    assert engine.taken == []
