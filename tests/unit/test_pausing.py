"""A paused run: continued, stopped, left alone."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from toolrl.app.ending import Ending, at_once, keeping_our_handler
from toolrl.app.pausing import Pausing, Unattended
from toolrl.errors import UserError


async def answered(pausing: Pausing, give) -> str:
    waiting = asyncio.create_task(pausing.wait("the rate fell", 30.0))
    await asyncio.sleep(0)
    assert pausing.why == "the rate fell"
    give()
    return await waiting


async def test_it_waits_until_it_is_told_what_to_do():
    pausing = Pausing()
    assert await answered(pausing, pausing.go_on) == "continue"
    assert await answered(pausing, lambda: pausing.go_on(roll_back=True)) == "roll_back"
    assert pausing.why is None and not pausing.stop_asked
    assert await answered(pausing, pausing.stop) == "stop"


async def test_a_run_that_is_not_paused_cannot_be_continued_but_stopped():
    pausing = Pausing()
    with pytest.raises(UserError, match="not paused"):
        pausing.go_on()
    assert pausing.stop() is False and pausing.stop_asked
    assert await pausing.wait("too late", 30.0) == "stop"


async def test_nobody_comes():
    with pytest.raises(Unattended, match="paused because the rate fell"):
        await Pausing().wait("the rate fell", 0.01)


async def test_what_it_waits_for_comes_or_the_stop_does():
    pausing, never = Pausing(), asyncio.Event()

    async def soon() -> int:
        return 7

    assert await pausing.unless_stopped(soon()) == 7
    waiting = asyncio.create_task(pausing.unless_stopped(never.wait()))
    await asyncio.sleep(0)
    assert not waiting.done()
    pausing.stop()
    assert await waiting is None

    async def breaks() -> None:
        raise ValueError("no batch")

    with pytest.raises(ValueError, match="no batch"):
        await Pausing().unless_stopped(breaks())


async def ended(train, ending_said: list[str]) -> str:
    """What became of a run that gets one SIGTERM, and another if it lives on."""

    async def run() -> str:
        with Ending(ending_said.append) as ending:
            return await train(ending)
        return "ended at once"

    task = asyncio.create_task(run())
    for _ in range(2):
        await asyncio.sleep(0.01)
        if not task.done():
            os.kill(os.getpid(), signal.SIGTERM)
    return await task


async def test_sigterm_ends_a_run_after_its_step_and_at_once_elsewhere():
    said: list[str] = []

    async def starts(ending: Ending) -> str:
        await asyncio.sleep(30)
        return "went on"

    assert await ended(starts, said) == "ended at once"
    assert "ends now" in said.pop()

    async def trains(ending: Ending) -> str:
        pausing = Pausing()
        ending.in_training(pausing)
        assert await pausing.unless_stopped(asyncio.Event().wait()) is None
        ending.in_training(None)
        return "checkpoint"

    assert await ended(trains, said) == "checkpoint"
    assert "after the step" in said.pop()

    async def hangs(ending: Ending) -> str:
        ending.in_training(Pausing())
        await asyncio.sleep(30)
        return "went on"

    assert await ended(hangs, said) == "ended at once"


async def test_a_cancelled_run_that_nobody_told_stays_cancelled():
    async def run() -> None:
        with Ending(print):
            await asyncio.sleep(30)

    task = asyncio.create_task(run())
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_nothing_cuts_short_how_a_told_run_cleans_up():
    cleaned = []

    async def starts(ending: Ending) -> str:
        try:
            await asyncio.sleep(30)
        finally:
            await asyncio.sleep(0.05)  # the second SIGTERM comes here
            cleaned.append("all")
        return "went on"

    assert await ended(starts, []) == "ended at once"
    assert cleaned == ["all"]


async def test_sigterm_is_the_runs_own_after_ray_has_started():
    said: list[str] = []

    async def starts(ending: Ending) -> str:
        with keeping_our_handler():
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(15))  # as `ray.init` does
        await asyncio.sleep(30)
        return "went on"

    assert await ended(starts, said) == "ended at once"
    assert "goes on at its last checkpoint" in said[0]


def test_before_a_run_is_under_way_sigterm_ends_the_process_well():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as end, at_once():
        os.kill(os.getpid(), signal.SIGTERM)
    assert end.value.code == 0
    assert signal.getsignal(signal.SIGTERM) is before
