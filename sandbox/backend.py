"""What a backend is to the pool: something that makes boxes. And what a box is: a channel, a cause of death, an end."""

from __future__ import annotations

import time
from typing import Protocol

from sandbox.channel import Channel
from sandbox.config import SandboxConfig
from sandbox.inside.frames import PROTOCOL_VERSION, Frame
from sandbox.result import SandboxUnavailable, Status


class Box(Protocol):
    """One place where code runs, for one episode at a time."""

    name: str
    born: float  # time.monotonic()
    uses: int

    @property
    def channel(self) -> Channel:
        """The stream to it."""

    async def cause_of_death(self) -> tuple[Status, str]:
        """Why the stream ended: `oom`, `died` or `infra_error`, and a sentence. May take a second."""

    async def destroy(self) -> None:
        """End the box and leave nothing behind. Never raises; may be called twice."""


class Backend(Protocol):
    """Makes boxes of one kind."""

    @property
    def name(self) -> str:
        """`docker` or `process`."""

    async def create(self) -> Box:
        """A box with a fresh interpreter. Raises SandboxUnavailable; leaves nothing behind when it fails or is
        cancelled."""

    async def tidy(self) -> None:
        """Remove what dead owners of the same run have left. Never raises."""

    async def close(self) -> None:
        """Free what the backend itself holds."""


async def prepare(channel: Channel, config: SandboxConfig, deadline_s: float, **more: int) -> Frame:
    """Send a new box its settings and check what it answers. Raises SandboxUnavailable, ChannelClosed, TimeoutError."""
    frame = await channel.request({**config.box_settings(), **more}, deadline_s=deadline_s)
    header = frame.header
    if header.get("protocol") != PROTOCOL_VERSION:
        raise SandboxUnavailable(
            f"the box speaks protocol {header.get('protocol')!r}, this is {PROTOCOL_VERSION}: rebuild the image with "
            "`python -m sandbox.image`"
        )
    if header.get("missing"):
        raise SandboxUnavailable(f"modules to import first are missing in the sandbox: {header['missing']}")
    if not header.get("clean"):
        raise SandboxUnavailable(f"a new box is not clean: {header.get('leftovers')}")
    return frame


def expired(box: Box, config: SandboxConfig) -> bool:
    """Whether a box has served its time. Half of the lease: a reaper never meets a box that its owner still uses."""
    return box.uses >= config.uses_per_box or time.monotonic() - box.born > config.lease_s / 2
