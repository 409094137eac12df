"""The sandbox hosts of a run, seen from the driver: start, watch, replace, stop.

Invariants:
- A host that died or fell silent is killed and replaced under a new name, wherever the resource `sandbox` is free; at most
  `MAX_RESTARTS` times in a row. One that cannot even be started at the beginning is an error at once.
- The run goes on while one host is left, and ends with an error when none is.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from actors.host_link import MISSES, SILENT_S
from actors.sandbox_host import LEASE_S, start_sandbox_host
from actors.sandbox_hosts import host_name
from sandbox import SandboxConfig
from toolrl.errors import RunError

log = logging.getLogger(__name__)

MAX_RESTARTS = 5
STARTED_WELL_S = 60.0  # a host that lived for so long has its restarts again
START_DEADLINE_S = 120.0
STOP_DEADLINE_S = 20.0
PING_S = 2.0


class SandboxHostsLost(RunError):
    """No sandbox host could be started, or none is left."""


class SandboxHostGroup:
    """`await SandboxHostGroup.start(…)`; `watch()` beside the training; `stop()`."""

    def __init__(self, config: SandboxConfig, count: int, *, lease_s: float = LEASE_S, cpus: float = 1.0) -> None:
        self.config = config
        self.count = count
        self.lease_s = lease_s
        self.cpus = cpus
        self.hosts: dict[int, Any] = {}  # index -> actor that serves
        self.restarts = 0
        self._complete = False  # all were up once; until then a failure is nothing that another try would mend
        self._keepers: dict[int, asyncio.Task[str]] = {}  # each ends with the reason why it gave up
        self._all_up = asyncio.Event()

    @classmethod
    async def start(
        cls, config: SandboxConfig, count: int, *, lease_s: float = LEASE_S, cpus: float = 1.0
    ) -> SandboxHostGroup:
        """Starts `count` hosts. Raises SandboxHostsLost when the first tries of one fail; says why."""
        group = cls(config, count, lease_s=lease_s, cpus=cpus)
        group._keepers = {index: asyncio.create_task(group._keep(index)) for index in range(count)}
        all_up = asyncio.create_task(group._all_up.wait())
        try:
            done, _ = await asyncio.wait([all_up, *group._keepers.values()], return_when=asyncio.FIRST_COMPLETED)
            if all_up not in done:
                raise SandboxHostsLost(f"a sandbox host did not start: {done.pop().result()}")
            group._complete = True
        except BaseException:
            await group.stop()
            raise
        finally:
            all_up.cancel()
        return group

    async def watch(self) -> None:
        """Runs until cancelled. Raises SandboxHostsLost when no host is left."""
        reasons = await asyncio.gather(*(asyncio.shield(keeper) for keeper in self._keepers.values()))
        raise SandboxHostsLost(f"no sandbox host is left: {'; '.join(reasons)}")

    async def stats(self, deadline_s: float = 5.0) -> list[dict[str, Any]]:
        """What each host that answers in time says about itself."""
        asked = [asyncio.wait_for(_value(host.stats.remote()), deadline_s) for host in self.hosts.values()]
        answers = await asyncio.gather(*asked, return_exceptions=True)
        return [answer for answer in answers if isinstance(answer, dict)]

    async def stop(self) -> None:
        """Stops every host: asked first, killed after a deadline."""
        for keeper in self._keepers.values():
            keeper.cancel()
        await asyncio.gather(*self._keepers.values(), return_exceptions=True)

    async def _keep(self, index: int) -> str:
        failures = 0
        while True:
            name = host_name(self.config.run, index)
            started = time.monotonic()
            # Creating a named actor asks Ray's directory.
            host = await asyncio.to_thread(start_sandbox_host, name, self.config, lease_s=self.lease_s, cpus=self.cpus)
            try:
                why = await self._serve(index, host)
            except asyncio.CancelledError:
                with contextlib.suppress(RayError, TimeoutError):
                    await asyncio.wait_for(_value(host.stop.remote()), STOP_DEADLINE_S)
                raise
            finally:
                self.hosts.pop(index, None)
                ray.kill(host, no_restart=True)
            failures = 1 if time.monotonic() - started > STARTED_WELL_S else failures + 1
            if failures > MAX_RESTARTS or not self._complete:
                log.error("sandbox host %s is given up: %s", name, why)
                return f"{name}: {why}"
            log.warning("sandbox host %s is replaced: %s", name, why)
            self.restarts += 1
            await asyncio.sleep(min(0.5 * 2 ** (failures - 1), 10.0) if failures > 1 else 0.0)

    async def _serve(self, index: int, host: Any) -> str:
        """Starts a host and returns, when it has ended, why."""
        try:
            await asyncio.wait_for(_value(host.start.remote()), START_DEADLINE_S)
        except TimeoutError:
            return f"not ready after {START_DEADLINE_S:g} s (is the Ray resource `sandbox` free on a node?)"
        except RayTaskError as error:
            return f"{type(error.cause).__name__}: {error.cause}"
        except RayError as error:
            return f"{type(error).__name__} while it started"
        self.hosts[index] = host
        if len(self.hosts) == self.count:
            self._all_up.set()
        serving = asyncio.ensure_future(_value(host.serve.remote()))
        try:
            misses = 0
            while misses < MISSES:
                done, _ = await asyncio.wait([serving], timeout=PING_S)
                if done:
                    end = serving.exception()
                    return f"it died ({type(end).__name__})" if end else "it was stopped"
                try:
                    await asyncio.wait_for(_value(host.beat.remote("driver")), SILENT_S)
                    misses = 0
                except TimeoutError:
                    misses += 1
                except RayError as error:
                    return f"it died ({type(error).__name__})"
            return f"it was silent for {MISSES * SILENT_S:g} s"
        finally:
            serving.cancel()


async def _value(ref: Any) -> Any:
    return await ref
