"""An engine that joins has the latest weights, also when others are published at that very moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from actors.weights.channel import WeightChannel
from actors.weights.publication import Publication


@pytest.mark.parametrize("later", range(8))
async def test_a_publication_in_the_moment_of_joining_is_not_missed(later: int) -> None:
    channel, loop = WeightChannel(deadline_s=5), asyncio.get_running_loop()
    await channel.publish(Publication(1, ()))
    publishing: list[asyncio.Task[Any]] = []

    def publish_after(turns: int) -> None:
        """Publishes so many turns of the event loop from now on."""
        if turns == 0:
            publishing.append(asyncio.create_task(channel.publish(Publication(2, ()))))
        else:
            loop.call_soon(publish_after, turns - 1)

    async def take(given: Any) -> dict[str, Any]:
        if given.version == 1:
            publish_after(later)
        return {"version": given.version}

    await channel.join("late", take)
    behind_on_joining = dict(channel.behind)
    await asyncio.sleep(0.02)
    await asyncio.gather(*publishing)
    assert behind_on_joining == {} and channel.behind == {}
