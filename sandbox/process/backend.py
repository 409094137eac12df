"""Boxes that are processes of this machine, for where no Docker engine answers.

The stream is a socket pair: when the owner dies, however, its end closes and the box ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sandbox.backend import prepare
from sandbox.channel import Channel, ChannelClosed
from sandbox.config import SandboxConfig
from sandbox.process.launch import confined_command, confinement, plain_command
from sandbox.result import SandboxUnavailable, Status, exit_name

_END_DEADLINE_S = 2.0
_OWN_EXITS = (0, 75, 76)
_FIRST_UID = 2**20  # each box of root's gets a uid of its own from here on
_UIDS = 2**20


@dataclass
class _Started:
    process: subprocess.Popen[bytes]
    pidfd: int  # of the box's first process
    stream: socket.socket
    log_fd: int


def _start(config: SandboxConfig) -> _Started:
    """Start a box. Blocking. Raises SandboxUnavailable, OSError."""
    ours, theirs = socket.socketpair()
    log_fd = os.memfd_create("sandbox-log")
    info, info_in = os.pipe()
    try:
        environment = {"PATH": os.environ.get("PATH", "/usr/bin:/bin")}
        confined = confinement(config).bubblewrap
        if confined:
            command = confined_command(config, info_in)
        else:
            command, environment = plain_command()
        process = subprocess.Popen(
            command,
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=log_fd,
            pass_fds=(info_in,),
            env=environment,
            start_new_session=True,
        )
        os.close(info_in)
        info_in = -1
        pid = _child_pid(info) if confined else process.pid
        if pid is None:
            process.wait()
            raise SandboxUnavailable(f"bubblewrap failed: {_log(log_fd)}")
        return _Started(process, os.pidfd_open(pid), ours, log_fd)
    except BaseException:
        ours.close()
        os.close(log_fd)
        raise
    finally:
        theirs.close()
        os.close(info)
        if info_in >= 0:
            os.close(info_in)


def _child_pid(info: int) -> int | None:
    """The pid that bubblewrap reports, or None where it fails before."""
    text = b""
    while chunk := os.read(info, 4096):
        text += chunk
        with contextlib.suppress(ValueError):
            return int(json.loads(text)["child-pid"])
    return None


def _log(log_fd: int) -> str:
    return os.pread(log_fd, 4096, 0).decode(errors="replace").strip()


class ProcessBox:
    """One box and its stream."""

    def __init__(self, started: _Started, channel: Channel, threads: ThreadPoolExecutor) -> None:
        self.name = f"pid-{started.process.pid}"
        self.channel = channel
        self.born, self.uses = time.monotonic(), 0
        self._started, self._threads = started, threads
        self._destroyed = False

    async def cause_of_death(self) -> tuple[Status, str]:
        """By its exit code."""
        if self._destroyed:
            return "infra_error", "the box was removed"
        code = await asyncio.get_running_loop().run_in_executor(self._threads, self._end)
        if code in _OWN_EXITS or code in (-signal.SIGKILL, 128 + signal.SIGKILL):
            return "infra_error", f"the box ended ({exit_name(code)}) {_log(self._started.log_fd)}".strip()
        return "died", f"the box's first process died ({exit_name(code)})"

    def _end(self) -> int:
        """Wait for the box to end by itself, then make it. Blocking."""
        process = self._started.process
        try:
            return process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._started.pidfd, signal.SIGKILL)
        try:
            return process.wait(_END_DEADLINE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    async def destroy(self) -> None:
        """Close the stream, which ends the box, and wait for it."""
        if self._destroyed:
            return
        self._destroyed = True
        self.channel.close()
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._threads, self._finish))

    def _finish(self) -> None:
        self._end()
        os.close(self._started.pidfd)
        os.close(self._started.log_fd)


class ProcessBackend:
    """Starts boxes; see `launch` for what confines them."""

    name = "process"

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(max_workers=4, thread_name_prefix="sandbox-process")

    async def create(self) -> ProcessBox:
        """Start and prepare a box. Raises SandboxUnavailable."""
        loop = asyncio.get_running_loop()
        starting = asyncio.ensure_future(loop.run_in_executor(self._threads, _start, self._config))
        try:
            started = await asyncio.shield(starting)
        except (OSError, SandboxUnavailable) as error:
            raise SandboxUnavailable(f"a local box could not be started: {error}") from error
        except asyncio.CancelledError:  # the thread goes on: end what it starts
            starting.add_done_callback(_abandon)
            raise
        _, channel = await loop.create_connection(Channel, sock=started.stream)
        box = ProcessBox(started, channel, self._threads)
        try:
            # A uid that no other box on this machine is likely to have: process counts are kept by uid.
            uid = _FIRST_UID + random.SystemRandom().randrange(_UIDS)
            await prepare(channel, self._config, self._config.create_deadline_s, uid=uid)
        except BaseException as error:
            said = _log(started.log_fd)
            await box.destroy()
            if isinstance(error, (ChannelClosed, TimeoutError)):
                raise SandboxUnavailable(f"a local box did not come up: {error} {said}".strip()) from error
            raise
        return box

    async def tidy(self) -> None:
        """Nothing: a local box ends with its owner's end of the stream."""

    async def close(self) -> None:
        """Free the threads."""
        self._threads.shutdown(wait=False)


def _abandon(starting: asyncio.Future[_Started]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        started = starting.result()
        started.stream.close()
        started.process.wait()
