"""Soak of the sandbox: thousands of episodes, hostile and honest, over one pool; counts what leaks, stays or slows down.

`python -m benchmarks.sandbox_soak --episodes 10000` prints a summary and exits with 1 where a promise broke. Hostile code
runs in boxes only: the backend is Docker, or bubblewrap on request.
"""

# ruff: noqa: E501  one case a line
from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field

from sandbox import SandboxConfig, SandboxPool
from sandbox.reaper import list_boxes
from sandbox.session import Session

POOL = 8
ENOUGH_S = 30.0
TIMEOUT_S = 0.3
MARK = "88.125"  # seconds that what a cell leaves behind sleeps: how its processes are found on this machine

# The first cell of every episode: everything that an earlier one may have left where it looks.
INSPECT = """
import os, sys, math
[name for name, found in {
    "variables": "secret" in globals(),
    "module": hasattr(math, "secret"),
    "environment": "SECRET" in os.environ,
    "work folder": os.listdir("."),
    "temporary folder": os.listdir(os.environ["TMPDIR"]),
    "shared memory": os.listdir("/dev/shm"),
    "processes": sorted(int(p) for p in os.listdir("/proc") if p.isdigit()) != [1, os.getpid()],
    "imports": sys.path[0] != os.getcwd() or "secret_module" in sys.modules,
    "trace": sys.gettrace() or sys.getprofile(),
}.items() if found]
"""
LEAVE = f"""
import math, os, subprocess
secret = math.secret = os.environ["SECRET"] = "s"
for folder in (".", os.environ["TMPDIR"]): open(folder + "/secret", "w").write("s")
open("secret_module.py", "w").write("x = 1"); import secret_module
subprocess.Popen(["sleep", "{MARK}"], start_new_session=True)
"""
HONEST = (
    ("sum(i * i for i in range(1000))", "332833500"),
    ("import json\njson.dumps({'a': [1, 2, 3]})", "'{\"a\": [1, 2, 3]}'"),
    ("import re\nre.findall(r'\\d+', 'a1b22c333')", "['1', '22', '333']"),
    ("from fractions import Fraction\nsum(Fraction(1, n) for n in range(1, 20))", "Fraction(275295799, 77597520)"),
    ("def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\nfib(12)", "144"),
)
FORGE = (
    "import os, struct, sys\nf = sys._getframe()\nwhile f:\n    l = f.f_locals\n"
    "    if 'token' in l and 'result' in l: token, fd = l['token'], l['result']\n    f = f.f_back\n"
    "os.write(fd, struct.pack('>B16sBBiII', 1, token, 0, 0, 0, 6, 0) + b'forged')"
)
# Each with the statuses that are right.
HOSTILE = (
    ("while True: pass", ("timeout",)),
    ("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ("timeout",)),
    ("hold = []\nwhile True: hold.append(bytearray(2**23))", ("oom", "error", "timeout")),
    ("import os\nwhile True: os.write(2, b'y' * 65536)", ("output_limit", "timeout")),
    ("import os\nos._exit(3)", ("died",)),
    ("import ctypes\nctypes.string_at(0)", ("died",)),
    ("import os\nfor fd in range(3, 300):\n    try: os.write(fd, b'x' * 64)\n    except OSError: pass", ("protocol_violation",)),
    (FORGE, ("protocol_violation",)),
    ("import sys\nsys.settrace(lambda *a: 1 / 0)", ("ok", "error", "died")),
    ("import builtins, json, os\nbuiltins.len = builtins.repr = None\njson.dumps = os.write = None\n1", ("ok", "error")),
    ("import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')", ("ok",)),
    ("import os\nfor _ in range(8):\n    if os.fork() == 0:\n        os.setsid()\n        while True: pass", ("ok",)),
    ("import threading, time\ndef late():\n    while True: print('LATE'); time.sleep(0.001)\nthreading.Thread(target=late, daemon=True).start()", ("ok",)),
    ("open('big', 'wb').write(bytes(200 * 2**20))", ("error", "oom", "timeout")),
    ("import os\nos.makedirs('a/b')\nfor p in ('a/b', 'a', '.'): os.chmod(p, 0)", ("ok",)),
    ("open('/dev/shm/secret', 'w').write('s')", ("ok",)),
    ("import os\nos.kill(-1, 9)", ("died", "ok", "error")),
    ("import os\nos.execv('/bin/sleep', ['sleep', '" + MARK + "'])", ("timeout",)),
    ("import os\nos.closerange(0, 1024)", ("died", "protocol_violation", "timeout")),
)  # fmt: skip


@dataclass
class Report:
    """What a soak came to. Times in milliseconds, of honest cells in the first and the last third of the episodes."""

    backend: str = ""
    episodes: int = 0
    hostile: int = 0
    seconds: float = 0.0
    statuses: dict[str, int] = field(default_factory=dict)
    leaks: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    boxes_made: int = 0
    boxes_at_most: int = 0
    host_mib_early: float = 0.0
    host_mib_end: float = 0.0
    p50_ms_first: float = 0.0
    p50_ms_last: float = 0.0
    p99_ms_first: float = 0.0
    p99_ms_last: float = 0.0

    @property
    def broken(self) -> list[str]:
        """The promises that did not hold."""
        found = [f"{len(self.leaks)} leaks"] if self.leaks else []
        found += [f"{len(self.wrong)} wrong outcomes"] if self.wrong else []
        found += [f"{len(self.orphans)} orphans"] if self.orphans else []
        if self.host_mib_end - self.host_mib_early > 16:
            found.append(f"the host process grew from {self.host_mib_early:.0f} to {self.host_mib_end:.0f} MiB")
        return found


async def soak(episodes: int, backend: str = "docker", seed: int = 0, hostile_share: float = 0.4) -> Report:
    """Run `episodes` over a pool of 8, as many at once. Deterministic in `seed` but for timing."""
    run = f"soak-{os.getpid()}"
    config = SandboxConfig(
        backend=backend,  # type: ignore[arg-type]
        confinement="bubblewrap",
        min_sessions=POOL,
        max_sessions=POOL,
        run=run,
    )
    report, statuses = Report(episodes=episodes), Counter[str]()
    honest_s: list[tuple[int, float]] = []
    numbers = iter(range(episodes))
    started = time.monotonic()
    async with SandboxPool(config) as pool:
        report.backend = pool.stats().backend

        async def player() -> None:
            for number in numbers:
                draw = random.Random(f"{seed}/{number}")
                if number == episodes // 10:
                    report.host_mib_early = _resident_mib()
                if number % 1000 == 999:
                    print(f"{number + 1} episodes, {len(report.leaks)} leaks", file=sys.stderr)
                async with await pool.acquire(episode_id=f"soak-{number}") as session:
                    _look(await session.run(INSPECT, timeout_s=ENOUGH_S), number, report)
                    await _play_honest(session, draw, number, honest_s, report)
                    if draw.random() < hostile_share:
                        report.hostile += 1
                        await _play_hostile(session, draw, number, statuses, report)

        await asyncio.gather(*(player() for _ in range(POOL)))
        report.host_mib_end = _resident_mib()
        report.boxes_made = pool.stats().created
        if backend == "docker":
            report.boxes_at_most = len(await asyncio.to_thread(list_boxes, run))
    report.seconds = time.monotonic() - started
    report.statuses = dict(statuses)
    report.orphans = await _orphans(run if report.backend == "docker" else None)
    _compare(report, honest_s, episodes)
    return report


def _look(result, number: int, report: Report) -> None:
    if result.status != "ok" or result.value != "[]" or result.stdout or result.stderr:
        report.leaks.append(f"episode {number}: {result.status} {result.value} {result.stdout[:80]!r} {result.note}")


async def _play_honest(
    session: Session, draw: random.Random, number: int, honest_s: list[tuple[int, float]], report: Report
) -> None:
    for _ in range(3):
        code, expected = draw.choice(HONEST)
        result = await session.run(code, timeout_s=ENOUGH_S)
        honest_s.append((number, result.wall_s))
        if result.value != expected:
            report.wrong.append(f"episode {number}: {code!r} gave {result.status} {result.value} {result.note}")


async def _play_hostile(
    session: Session, draw: random.Random, number: int, statuses: Counter[str], report: Report
) -> None:
    await session.run(LEAVE, timeout_s=ENOUGH_S)
    code, right = draw.choice(HOSTILE)
    result = await session.run(code, timeout_s=ENOUGH_S if "oom" in right else TIMEOUT_S)
    statuses[result.status] += 1
    # On a busy machine what ends by itself may meet its deadline first.
    if result.status not in (*right, "timeout"):
        report.wrong.append(f"episode {number}: {code[:60]!r} gave {result.status} {result.note}")


async def _orphans(run: str | None) -> list[str]:
    """Containers and processes that are there two seconds after the pool was closed."""
    end = time.monotonic() + 2.0
    while True:
        boxes = [f"container {box.id[:12]}" for box in await asyncio.to_thread(list_boxes, run)] if run else []
        found = boxes + _sleepers()
        if not found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.1)


def _sleepers() -> list[str]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                if file.read() == b"sleep\0" + MARK.encode() + b"\0":
                    found.append(f"process {pid}")
        except OSError:
            continue
    return found


def _resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def _compare(report: Report, honest_s: list[tuple[int, float]], episodes: int) -> None:
    first = [seconds for number, seconds in honest_s if number < episodes / 3]
    last = [seconds for number, seconds in honest_s if number >= episodes * 2 / 3]
    report.p50_ms_first, report.p50_ms_last = (statistics.median(part) * 1e3 for part in (first, last))
    report.p99_ms_first, report.p99_ms_last = (statistics.quantiles(part, n=100)[98] * 1e3 for part in (first, last))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--backend", choices=("docker", "process"), default="docker")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    report = asyncio.run(soak(options.episodes, options.backend, options.seed))
    shown = asdict(report)
    for name in ("leaks", "wrong", "orphans"):
        shown[name] = {"count": len(shown[name]), "first": shown[name][:5]}
    print(json.dumps(shown, indent=1))
    if report.broken:
        sys.exit("; ".join(report.broken))


if __name__ == "__main__":
    main()
