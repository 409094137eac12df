"""What a hostile cell is, and how it is judged: its own end, the next run, and the box that the next episode finds."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from sandbox import RunResult, SandboxPool

TIMEOUT_S = 0.35  # of what does not end by itself
ENOUGH_S = 30.0  # of what ends by itself, soon unless the machine is busy

INSPECT = """
import os
(sorted(int(p) for p in os.listdir("/proc") if p.isdigit()) == [1, os.getpid()],
 os.listdir("."), os.listdir(os.environ["TMPDIR"]), os.listdir("/tmp"), os.listdir("/dev/shm"), "secret" in globals())
"""
AS_NEW = "(True, [], [], [], [], False)"
LIBC = (
    "import ctypes, os\nlibc = ctypes.CDLL(None, use_errno=True)\n"
    "def check(r):\n    if r < 0: raise OSError(ctypes.get_errno(), 'refused')\n    return r\n"
)


@dataclass(frozen=True)
class Hostile:
    """`statuses`: any of these is right. `shows`: must be in what comes back; `hides`: must not be. `within_s`: it
    returns so soon though nothing stops it. `spoils`: its own interpreter may be of no more use, until the reset."""

    name: str
    code: str
    statuses: tuple[str, ...]
    shows: str = ""
    hides: str = ""
    exit_code: int | None = None
    backends: tuple[str, ...] = ("docker", "process")
    timeout_s: float = ENOUGH_S
    within_s: float = 0.0
    spoils: bool = False


def refused(name: str, code: str, **more) -> Hostile:
    """Code that must raise: it prints REFUSED where it does, and a token where it does not."""
    lines = "\n".join("    " + line for line in code.strip().splitlines())
    return Hostile(
        name,
        f"try:\n{lines}\n    print('DONE')\nexcept Exception as e:\n    print('REFUSED', e)",
        ("ok",),
        "REFUSED",
        "DONE",
        **more,
    )


async def judge(pool: SandboxPool, case: Hostile) -> None:
    """Run a case on a pool of one box and check all that it must not have done."""
    if pool.stats().backend not in case.backends:
        pytest.skip(f"the {pool.stats().backend} backend does not promise this")
    async with await pool.acquire(episode_id=case.name) as session:
        assert (await session.run("secret = 41", timeout_s=ENOUGH_S)).status == "ok"
        start = time.monotonic()
        result = await session.run(case.code, timeout_s=case.timeout_s)
        took_s = time.monotonic() - start
        _judge_result(case, result)
        assert took_s < case.timeout_s + pool.config.grace_s + 3, result
        assert not case.within_s or took_s < case.within_s, result

        after = await session.run("secret + 1", timeout_s=ENOUGH_S)
        if result.state_lost:
            assert after.status == "error" and "NameError" in after.stderr and "gone" in result.note, after
        elif not case.spoils:
            assert after.value == "42" or after.state_lost or after.status == "protocol_violation", after
    await judge_next_episode(pool, case.name)


def _judge_result(case: Hostile, result: RunResult) -> None:
    seen = "\n".join((result.stdout, result.stderr, result.value or "", result.note))
    assert result.status in case.statuses, result
    assert case.shows in seen, result
    assert not case.hides or case.hides not in seen, result
    assert case.exit_code is None or result.exit_code == case.exit_code, result
    assert result.state_lost == (result.status not in ("ok", "error")), result


async def judge_next_episode(pool: SandboxPool, name: str) -> None:
    """The next episode finds no process but the first and its own, empty folders, none of the old names."""
    async with await pool.acquire(episode_id=f"after {name}") as session:
        inside = await session.run(INSPECT, timeout_s=ENOUGH_S)
        assert inside.value == AS_NEW, inside
        assert inside.stdout == inside.stderr == ""
        fresh = await session.run(
            "import math, os\n'secret' in os.environ or 'SECRET' in os.environ or hasattr(math, 'secret')",
            timeout_s=ENOUGH_S,
        )
        assert fresh.value == "False", fresh
