"""Boxes that are hardened containers of a Docker engine.

Lifecycle calls go through the Docker SDK in threads; the stream is an asyncio connection to the engine's socket. A
container removes itself when it ends, and it ends when its attached stream does.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import docker
import docker.errors
import docker.utils
import requests.exceptions

from sandbox.backend import prepare
from sandbox.channel import Channel, ChannelClosed, DockerChannel
from sandbox.config import SandboxConfig
from sandbox.image.guard import WIPED_MOUNTS
from sandbox.labels import labels_of
from sandbox.result import SandboxUnavailable, Status, exit_name

logger = logging.getLogger(__name__)
T = TypeVar("T")
ENGINE_ERRORS = (docker.errors.DockerException, requests.exceptions.RequestException, OSError)
_UID = 10001
# gVisor's kernel is a process with threads of its own, several for each process in it, and dies where it gets none.
_GVISOR_THREADS = 16
_EVENT_WAIT_S = 2  # the engine notes a death a little after the stream has ended
_SIGKILLED = 137
_OWN_EXITS = ("0", "75", "76", "78")  # the warden's own: the stream ended or was bad, silence, the guard


class DockerBox:
    """One running container and its stream."""

    def __init__(self, backend: DockerBackend, name: str, channel: DockerChannel) -> None:
        self.name, self.channel = name, channel
        self.born, self.uses = time.monotonic(), 0
        self._backend = backend
        self._destroyed = False

    async def cause_of_death(self) -> tuple[Status, str]:
        """Ask the engine's events, which outlive the container."""
        if self._destroyed:
            return "infra_error", "the box was removed"
        try:
            events = await self._backend.call(self._backend.last_events, self.name)
        except ENGINE_ERRORS as error:
            return "infra_error", f"the engine does not answer: {error}"
        code = events.get("die")
        if "oom" in events and code == str(_SIGKILLED):
            return "oom", "the whole box ran out of memory"
        if code is None or code == str(_SIGKILLED) or code in _OWN_EXITS:
            said = bytes(self.channel.stderr).decode(errors="replace").strip()
            return "infra_error", f"the stream to the box ended (exit code {code}) {said}".strip()
        return "died", f"the box's first process died ({exit_name(int(code))})"

    async def destroy(self) -> None:
        """Close the stream, which ends the container; remove it in case it does not."""
        if self._destroyed:
            return
        self._destroyed = True
        self.channel.close()
        await asyncio.shield(self._backend.remove(self.name))


class DockerBackend:
    """Makes containers by the config's limits."""

    name = "docker"

    def __init__(self, config: SandboxConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(max_workers=8, thread_name_prefix="sandbox-docker")
        self._api = connect(timeout_s=max(int(config.create_deadline_s), 10))

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Run a blocking SDK call in this backend's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, functools.partial(function, *arguments))

    async def create(self) -> DockerBox:
        """Create, attach, start, prepare. Raises SandboxUnavailable."""
        # A thread cannot be cancelled: wait for the name whatever happens, so that the container can be removed.
        creation = asyncio.ensure_future(self.call(self.make))
        name, channel = "", None
        try:
            name = await asyncio.shield(creation)
            channel = await self.attach(name)
            box = DockerBox(self, name, channel)
            await self.call(self.start, name)
            await prepare(channel, self._config, self._config.create_deadline_s)
            return box
        except BaseException as error:
            if channel is not None:
                channel.close()
            await asyncio.shield(self._undo(creation))
            if isinstance(error, (ChannelClosed, TimeoutError, *ENGINE_ERRORS)):
                said = bytes(channel.stderr).decode(errors="replace").strip() if channel else ""
                raise SandboxUnavailable(f"a container could not be made: {error} {said}".strip()) from error
            raise

    async def _undo(self, creation: asyncio.Future[str]) -> None:
        with contextlib.suppress(*ENGINE_ERRORS):
            await self.remove(await creation)

    def make(self, entrypoint: list[str] | None = None) -> str:
        """A hardened container, not started; its name. Another `entrypoint` than the warden is for measurements.
        Blocking."""
        config = self._config
        mount = f"rw,nosuid,nodev,noexec,uid={_UID},gid={_UID},mode=700,nr_inodes={config.inodes}"
        sizes = (config.work_mib, config.tmp_mib)
        host_config = self._api.create_host_config(
            auto_remove=True,
            cap_drop=["ALL"],
            security_opt=["no-new-privileges"],
            read_only=True,
            network_mode="none",
            ipc_mode="private",
            shm_size=config.tmp_mib * 2**20,
            mem_limit=config.memory_mib * 2**20,
            memswap_limit=config.memory_mib * 2**20,
            pids_limit=config.pids * (_GVISOR_THREADS if config.runtime == "runsc" else 1),
            nano_cpus=int(config.cpus * 1e9),
            tmpfs={path: f"{mount},size={size}m" for path, size in zip(WIPED_MOUNTS, sizes, strict=True)},
            log_config=docker.types.LogConfig(type="none"),
            ulimits=[
                docker.types.Ulimit(name="nofile", soft=1024, hard=1024),
                docker.types.Ulimit(name="core", soft=0, hard=0),
            ],
            runtime=config.runtime,
        )
        created = self._api.create_container(
            config.image,
            user=f"{_UID}:{_UID}",
            hostname="sandbox",
            stdin_open=True,
            detach=False,  # the SDK's word for StdinOnce: the container's stdin ends with the attached stream
            tty=False,
            labels=labels_of(config),
            host_config=host_config,
            entrypoint=entrypoint,
        )
        return str(created["Id"])

    def start(self, name: str) -> None:
        """Start a container that was made. Blocking."""
        self._api.start(name)

    def attach_request(self, name: str) -> bytes:
        """What asks the engine for the stream to a container."""
        path = f"/v{self._api.api_version}/containers/{name}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        request = (
            f"POST {path} HTTP/1.1\r\nHost: docker\r\nConnection: Upgrade\r\nUpgrade: tcp\r\nContent-Length: 0\r\n\r\n"
        )
        return request.encode()

    async def attach(self, name: str) -> DockerChannel:
        """The stream to a container that was made."""
        request = self.attach_request(name)
        loop = asyncio.get_running_loop()
        kind, address = engine_address()
        if kind == "unix":
            _, channel = await loop.create_unix_connection(lambda: DockerChannel(request), address)
        else:
            host, _, port = address.rpartition(":")
            _, channel = await loop.create_connection(lambda: DockerChannel(request), host, int(port))
        try:
            async with asyncio.timeout(self._config.create_deadline_s):
                await channel.attached
        except BaseException:
            channel.close()
            raise
        return channel

    def last_events(self, name: str) -> dict[str, str]:
        """What the engine noted of a container until it ended: action → exit code or nothing."""
        seen: dict[str, str] = {}
        now = int(time.time())
        events = self._api.events(
            since=now - int(self._config.lease_s),
            until=now + _EVENT_WAIT_S,
            filters={"container": name, "event": ["oom", "die"]},
            decode=True,
        )
        try:
            for event in events:
                action = str(event.get("Action", event.get("status")))
                seen[action] = event.get("Actor", {}).get("Attributes", {}).get("exitCode", "")
                # Where the kernel killed the whole box, the two may come in either order.
                if "die" in seen and (seen["die"] != str(_SIGKILLED) or "oom" in seen):
                    break
        finally:
            events.close()
        return seen

    def execute(self, name: str, command: list[str]) -> float:
        """Seconds of a command by `docker exec`, which no box needs: it is measured for comparison. Blocking."""
        started = time.perf_counter()
        made = self._api.exec_create(name, command)
        self._api.exec_start(made["Id"])
        took_s = time.perf_counter() - started
        code = self._api.exec_inspect(made["Id"])["ExitCode"]
        if code != 0:
            raise RuntimeError(f"{command} ended with exit code {code} in {name}")
        return took_s

    async def remove(self, name: str) -> None:
        """Remove a container by force. One that is gone already, or an engine that does not answer, is no error."""
        with contextlib.suppress(*ENGINE_ERRORS):
            await self.call(functools.partial(self._api.remove_container, name, force=True, v=True))

    async def tidy(self) -> None:
        """Reap containers of this run that dead owners have left."""
        from sandbox.reaper import reap

        with contextlib.suppress(SandboxUnavailable, *ENGINE_ERRORS):
            for box in await self.call(reap, self._config.run):
                logger.warning("removed container %s of run %s: %s", box.id[:12], box.run, box.orphan)

    async def close(self) -> None:
        """Close the connection to the engine."""
        self._threads.shutdown(wait=False)
        self._api.close()


def engine_address() -> tuple[str, str]:
    """("unix", path) or ("tcp", "host:port") of the engine, by DOCKER_HOST. Raises SandboxUnavailable for other
    kinds."""
    url = str(docker.utils.parse_host(os.environ.get("DOCKER_HOST")))
    scheme, _, address = url.partition("://")
    if scheme in ("unix", "http+unix"):
        return "unix", "/" + address.lstrip("/")
    if scheme in ("tcp", "http") and not os.environ.get("DOCKER_TLS_VERIFY"):
        return "tcp", address
    raise SandboxUnavailable(f"DOCKER_HOST is {url}; the sandbox speaks to unix:// and plain tcp:// engines")


def connect(timeout_s: int) -> docker.APIClient:
    """A client of the engine. Raises SandboxUnavailable."""
    try:
        return docker.APIClient(version="auto", timeout=timeout_s, **docker.utils.kwargs_from_env())
    except ENGINE_ERRORS as error:
        raise SandboxUnavailable(f"no Docker engine answers: {error}") from error


__all__ = ["ENGINE_ERRORS", "Channel", "DockerBackend", "connect", "engine_address"]
