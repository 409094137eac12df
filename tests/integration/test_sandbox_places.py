"""A box starts wherever the Python and the checkout of its owner lie, under /tmp too, which a box has of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.requirements import need

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio
from sandbox import SandboxConfig, SandboxPool

async def main():
    async with SandboxPool(SandboxConfig(backend="process", confinement="bubblewrap", min_sessions=1)) as pool:
        session = await pool.acquire(episode_id="e")
        result = await session.run("import tempfile; open(tempfile.mktemp(), 'w').close(); 6 * 7", timeout_s=10)
        print(result.status, result.value)

asyncio.run(main())
"""


def test_a_box_starts_from_an_environment_under_tmp() -> None:
    need("bubblewrap")
    import tempfile

    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True, timeout=60)
        done = subprocess.run(
            [f"{folder}/bin/python", "-c", PROGRAM],
            capture_output=True,
            text=True,
            timeout=60,
            env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        )
    assert done.stdout.strip() == "ok 42", done.stderr[-2000:]
