"""Runs the probes, and what needs more than one cell: deadlines, isolation between episodes, files, a killed owner."""

# ruff: noqa: E501  cells

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from sandbox.config import SandboxConfig
from sandbox.pool import SandboxPool
from sandbox.process.launch import confinement
from sandbox.result import FileRefused, SandboxError
from sandbox.selfcheck import probes
from sandbox.selfcheck.probes import BOUNDED, CONFINED, CONTAINER, DOCKER, EVERYWHERE, GVISOR, PLAIN, Probe

_ENOUGH_S = 20.0
_OVERSHOOT_S = 0.25
_GVISOR_OVERSHOOT_S = 1.0  # where every system call of the box is a stop of a traced process
_ORPHAN_S = 2.0

Outcome = Literal["kept", "BROKEN", "not promised"]
Check = Callable[[SandboxPool], Awaitable[tuple[bool, str]]]


@dataclass(frozen=True)
class Finding:
    """One promise on this machine. `detail` holds what was measured, or what came instead."""

    promise: str
    outcome: Outcome
    detail: str = ""


async def run_checks(config: SandboxConfig) -> AsyncIterator[Finding]:
    """Check every promise, one finding at a time. Some ten seconds. Raises SandboxUnavailable."""
    config = dataclasses.replace(config, min_sessions=1, max_sessions=2)
    async with SandboxPool(config) as pool:
        kind = await asyncio.to_thread(_kind, pool)
        for group in (probes.NOTEBOOK, probes.ENDINGS, probes.CONFINEMENT, CONTAINER, probes.FILES):
            session = await pool.acquire(episode_id="check")
            try:
                for probe in group:
                    if kind not in probe.kinds:
                        yield Finding(probe.promise, "not promised", f"by {kind}")
                        continue
                    result = await session.run(_for_kind(probe, kind), timeout_s=probe.timeout_s)
                    if probe.holds(result):
                        yield Finding(probe.promise, "kept", probe.measured(result))
                    else:
                        said = result.value or result.stderr.strip()[-80:] or result.note
                        yield Finding(probe.promise, "BROKEN", f"{result.status}: {said}")
            finally:
                await session.release()
        for promise, kinds, check in _CHECKS:
            if kind in kinds:
                yield await _checked(promise, check, pool)
            else:
                yield Finding(promise, "not promised", f"by {kind}")


def _kind(pool: SandboxPool) -> str:
    if pool.stats().backend == "docker":
        return GVISOR if pool.config.runtime == "runsc" else DOCKER
    return CONFINED if confinement(pool.config).bubblewrap else PLAIN


def _for_kind(probe: Probe, kind: str) -> str:
    return f"DOCKER = {kind in (DOCKER, GVISOR)}\n{probe.code}" if "DOCKER" in probe.code else probe.code


async def _checked(promise: str, check: Check, pool: SandboxPool) -> Finding:
    try:
        kept, detail = await check(pool)
    except (SandboxError, TimeoutError, OSError) as error:
        kept, detail = False, str(error)
    return Finding(promise, "kept" if kept else "BROKEN", detail)


async def _deadline(pool: SandboxPool) -> tuple[bool, str]:
    """Loops that will not listen."""
    code = "import signal\nfor s in (2, 14, 15): signal.signal(s, signal.SIG_IGN)\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass"
    over = []
    async with await pool.acquire(episode_id="deadline") as session:
        for _ in range(3):
            start = time.monotonic()
            result = await session.run(code, timeout_s=0.3)
            over.append(time.monotonic() - start - 0.3)
            if result.status != "timeout" or "gone" not in result.note:
                return False, f"{result.status} {result.note}"
    bound_s = _GVISOR_OVERSHOOT_S if _kind(pool) == GVISOR else _OVERSHOOT_S
    return min(over) <= bound_s, f"{statistics.median(over) * 1e3:.0f} ms late"


async def _fork_bomb(pool: SandboxPool) -> tuple[bool, str]:
    session = await pool.acquire(episode_id="bomb")
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    result = await session.run(bomb, timeout_s=0.3)
    await session.release()
    async with await pool.acquire(episode_id="after") as session:
        after = await session.run("1 + 1", timeout_s=_ENOUGH_S)
    # gVisor's kernel takes threads and memory of its own for each process: its box may end before the deadline comes,
    # and the engine does not always know of what.
    contained = result.status == "timeout" or _kind(pool) == GVISOR
    return contained and after.value == "2", result.status


async def _isolation(pool: SandboxPool) -> tuple[bool, str]:
    async with await pool.acquire(episode_id="first") as session:
        left = await session.run(probes.SECRETS, timeout_s=_ENOUGH_S)
    async with await pool.acquire(episode_id="second") as session:
        found = await session.run(probes.FIND_SECRETS, timeout_s=_ENOUGH_S)
    return left.status == "ok" and found.value == str([False] * 5), found.value or found.stderr[-80:]


async def _reuse(pool: SandboxPool) -> tuple[bool, str]:
    times = []
    for _ in range(10):
        start = time.monotonic()
        session = await pool.acquire(episode_id="reuse")
        times.append(time.monotonic() - start)
        await session.run("x = 1", timeout_s=_ENOUGH_S)
        await session.release()
        await asyncio.sleep(0.03)
    return True, f"{statistics.median(times) * 1e3:.2f} ms"


async def _cancelled(pool: SandboxPool) -> tuple[bool, str]:
    async with await pool.acquire(episode_id="cancelled") as session:
        running = asyncio.create_task(session.run("import time\ntime.sleep(30)\n'late'", timeout_s=40))
        await asyncio.sleep(0.1)
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running
        after = await session.run("40 + 2", timeout_s=_ENOUGH_S)
    return after.value == "42" and after.state_lost, after.note


async def _files(pool: SandboxPool) -> tuple[bool, str]:
    data = os.urandom(2**20)
    async with await pool.acquire(episode_id="files") as session:
        await session.put("a/data.bin", data)
        seen = [(file.name, file.size) for file in await session.files()]
        same = await session.get("a/data.bin") == data
        refused = 0
        await session.run("import os\nos.symlink('/etc/passwd', 'link')", timeout_s=_ENOUGH_S)
        for name in ("../x", "/etc/passwd", "link"):
            try:
                await session.get(name)
            except FileRefused:
                refused += 1
    return same and seen == [("a/data.bin", 2**20)] and refused == 3, f"{refused} of 3 bad names refused"


async def _code_size(pool: SandboxPool) -> tuple[bool, str]:
    async with await pool.acquire(episode_id="size") as session:
        result = await session.run("#" * (pool.config.max_code_bytes + 1), timeout_s=_ENOUGH_S)
    return result.status == "error" and "refused" in result.stderr, result.status


_OWNER = """
import asyncio, sys
from sandbox import SandboxConfig, SandboxPool
async def main():
    config = SandboxConfig(backend=sys.argv[1], confinement=sys.argv[2], image=sys.argv[3], runtime=sys.argv[4],
                           min_sessions=2, max_sessions=2, run=sys.argv[5])
    async with SandboxPool(config) as pool:
        session = await pool.acquire(episode_id="owner")
        asyncio.create_task(session.run("import os\\nos.system('sleep ' + " + repr(sys.argv[6]) + " + ' &')\\nwhile True: pass", timeout_s=60))
        await asyncio.sleep(0.5)
        print("ready", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


async def _orphans(pool: SandboxPool) -> tuple[bool, str]:
    """Kill an owner of two boxes, one busy, and see how long anything of it lives."""
    return await asyncio.to_thread(_kill_an_owner, pool.config, pool.stats().backend)


def _kill_an_owner(config: SandboxConfig, backend: str) -> tuple[bool, str]:
    run, nap = f"check-orphans-{os.getpid()}", f"77.{os.getpid()}"
    command = [sys.executable, "-c", _OWNER, backend, config.confinement, config.image, config.runtime, run, nap]
    owner = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )
    try:
        assert owner.stdout is not None
        if owner.stdout.readline() != "ready\n":
            return False, "the owner did not start"
        if not _left(backend, run, nap):
            return False, "the owner's cell was not seen to run"
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    killed = time.monotonic()
    while _left(backend, run, nap) and time.monotonic() - killed < 5 * _ORPHAN_S:
        time.sleep(0.02)
    took_s = time.monotonic() - killed
    return took_s < _ORPHAN_S, f"{took_s:.2f} s"


def _left(backend: str, run: str, nap: str) -> bool:
    if backend == "docker":
        from sandbox.reaper import list_boxes

        if list_boxes(run):
            return True
    sought = b"sleep\0" + nap.encode() + b"\0"
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            if file.read() == sought:
                return True
    return False


async def _reaper(pool: SandboxPool) -> tuple[bool, str]:
    from sandbox.reaper import list_boxes, reap

    before = await asyncio.to_thread(list_boxes, pool.config.run)
    reaped = await asyncio.to_thread(reap, pool.config.run)
    mine = [box for box in before if not box.orphan]
    after = {box.id for box in await asyncio.to_thread(list_boxes, pool.config.run)}
    return bool(mine) and all(box.id in after for box in mine), f"{len(mine)} kept, {len(reaped)} removed"


_CHECKS: tuple[tuple[str, tuple[str, ...], Check], ...] = (
    ("a deadline is kept, whatever the cell ignores (≤ 250 ms late; gVisor: 1 s)", EVERYWHERE, _deadline),
    ("a fork bomb is contained", BOUNDED, _fork_bomb),
    ("variables, modules, environment and files end with the episode", EVERYWHERE, _isolation),
    ("a warm box is handed out at once", EVERYWHERE, _reuse),
    ("a cancelled run leaves nothing to the next", EVERYWHERE, _cancelled),
    ("files go in and out; bad names and links are refused", EVERYWHERE, _files),
    ("code over the size limit is refused", EVERYWHERE, _code_size),
    ("the reaper leaves boxes of a living owner alone", (DOCKER, GVISOR), _reaper),
    ("a killed owner leaves nothing after 2 s", EVERYWHERE, _orphans),
)
