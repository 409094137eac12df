"""What a session promises, on every backend: containers, bubblewrap, plain subprocesses."""

from __future__ import annotations

import asyncio
import os

import pytest
import pytest_asyncio

from sandbox import FileRefused, SandboxConfig, SandboxError, SandboxPool
from tests.requirements import need

pytestmark = pytest.mark.asyncio(loop_scope="module")
ENOUGH_S = 30.0
BACKENDS = {
    "docker": {"backend": "docker", "image": os.environ.get("TOOLRL_SANDBOX_IMAGE", "toolrl-sandbox:latest")},
    "bubblewrap": {"backend": "process", "confinement": "bubblewrap"},
    "plain": {"backend": "process", "confinement": "none"},
}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=list(BACKENDS))
async def pool(request):
    if request.param != "plain":
        need(request.param)
    config = SandboxConfig(
        **BACKENDS[request.param], min_sessions=1, max_sessions=2, timeout_s=ENOUGH_S, run="sessions"
    )
    async with SandboxPool(config) as pool:
        yield pool


@pytest_asyncio.fixture(loop_scope="module")
async def session(pool):
    async with await pool.acquire(episode_id="test") as session:
        yield session


async def test_state_lives_over_the_runs_of_an_episode(session):
    assert (await session.run("import math\nx = 6\ndef f(y): return x * y")).value is None
    result = await session.run("print('out')\nf(7)")
    assert (result.status, result.stdout, result.value, result.exit_code) == ("ok", "out\n", "42", None)
    assert not result.state_lost and not result.truncated and result.stdout_bytes == 4
    assert result.cpu_s >= 0 and 0 < result.wall_s < ENOUGH_S and result.queue_s >= 0


async def test_nothing_lives_beyond_the_episode(pool):
    async with await pool.acquire(episode_id="first") as session:
        await session.run("import sys\nx = 1\nsys.modules['math'].leak = 1\nopen('left', 'w').write('x')")
    async with await pool.acquire(episode_id="second") as session:
        result = await session.run("import math, os\n('x' in globals(), hasattr(math, 'leak'), os.listdir('.'))")
        assert result.value == "(False, False, [])"


async def test_an_error_keeps_the_state_and_shows_the_users_frames(session):
    result = await session.run("x = 1\ndef f(): return x / 0\nf()")
    assert result.status == "error" and not result.state_lost
    assert result.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"
    assert '<cell 1>", line 2, in f' in result.stderr and "sandbox" not in result.stderr
    assert (await session.run("x")).value == "1"


async def test_output_of_child_processes_is_captured(session):
    result = await session.run("import os\nos.system('echo child; echo error >&2')\nprint('parent')")
    assert result.stdout == "child\nparent\n" and result.stderr == "error\n"


async def test_a_timeout_keeps_the_output_and_says_that_state_is_lost(session):
    await session.run("x = 1\nopen('kept', 'w').write('file')")
    result = await session.run("print('before')\nwhile True: pass", timeout_s=0.4)
    assert result.status == "timeout" and result.stdout == "before\n" and result.state_lost
    assert result.wall_s >= 0.4 and "0.4 s" in result.note and "gone" in result.note
    after = await session.run("'x' in globals(), open('kept').read()")
    assert after.value == "(False, 'file')" and not after.state_lost


async def test_a_death_is_told_with_its_code(session):
    result = await session.run("import os\nprint('last words')\nos._exit(3)")
    assert (result.status, result.exit_code, result.stdout) == ("died", 3, "last words\n")
    assert (await session.run("1 + 1")).value == "2"


async def test_long_output_keeps_head_and_tail_and_tells_the_count(session, pool):
    result = await session.run("for i in range(30000): print(i)")
    assert result.status == "ok" and result.truncated and result.stdout_bytes == 168890
    assert result.stdout.startswith("0\n1\n") and result.stdout.endswith("29998\n29999\n")
    assert f"of {result.stdout_bytes} bytes omitted" in result.stdout
    assert len(result.stdout.encode()) <= pool.config.max_output_bytes + 100


async def test_a_character_at_the_cap_or_across_reads_stays_whole(session):
    result = await session.run("for i in range(5000): print('x' * (i % 4) + '€é😀' * 7, end='')")
    assert result.truncated and "\\x" not in result.stdout
    result = await session.run(
        "import os, time\nfor b in '€uro'.encode():\n    os.write(1, bytes([b])); time.sleep(0.01)"
    )
    assert result.stdout == "€uro"


async def test_numpy_works_near_the_memory_limit(session):
    assert (await session.run("import numpy\nfloat(numpy.ones(25_000_000).sum())")).value == "25000000.0"


async def test_code_over_the_limit_is_refused_without_harm(session):
    await session.run("x = 1")
    result = await session.run("#" * (10 * 2**20))
    assert result.status == "error" and "refused" in result.stderr and not result.state_lost
    assert (await session.run("x")).value == "1"


async def test_code_that_is_no_text_or_no_python_is_an_error(session):
    for code in ("1 +", "x = '\ud800'\x00", "\x00", ")"):
        assert (await session.run(code)).status == "error"
    assert (await session.run("")).status == "ok"
    assert (await session.run("'é' * 2")).value == "'éé'"


async def test_a_seed_makes_random_repeat_and_none_does_not(pool):
    async def draw(seed):
        async with await pool.acquire(episode_id="draw", seed=seed) as session:
            return (await session.run("import random\nrandom.random()")).value

    assert await draw(5) == await draw(5)
    assert await draw(None) != await draw(None)


async def test_files_go_in_are_listed_and_come_out(session):
    await session.put("data/in.bin", bytes(range(256)))
    result = await session.run("d = open('data/in.bin', 'rb').read()\nopen('out.txt', 'wb').write(d[::-1])\nlen(d)")
    assert result.value == "256"
    assert [(file.name, file.size) for file in await session.files()] == [("data/in.bin", 256), ("out.txt", 256)]
    assert await session.get("out.txt") == bytes(range(256))[::-1]


async def test_odd_file_names_and_links_are_refused(session, pool):
    await session.run("import os\nos.symlink('/etc/passwd', 'link')\nos.mkfifo('fifo')\nos.symlink('/', 'root')")
    for name in ("../x", "/etc/passwd", "link", "fifo", "missing", "root/etc/passwd", ""):
        with pytest.raises(FileRefused):
            await session.get(name)
    with pytest.raises(FileRefused):
        await session.put("link", b"x")
    with pytest.raises(FileRefused):
        await session.put("big", bytes(pool.config.max_file_bytes + 1))
    assert await session.files() == []


async def test_a_released_session_runs_no_more(pool):
    session = await pool.acquire(episode_id="released")
    await session.release()
    await session.release()
    with pytest.raises(SandboxError):
        await session.run("1")
    with pytest.raises(SandboxError):
        await session.files()


async def test_queue_time_is_kept_apart_from_run_time(pool):
    async with await pool.acquire(episode_id="a") as session:
        results = await asyncio.gather(*(session.run(f"import time\ntime.sleep(0.05)\n{i}") for i in range(5)))
    assert [result.value for result in results] == ["0", "1", "2", "3", "4"]
    assert results[-1].queue_s > 0.15 and all(result.status == "ok" for result in results)


async def test_the_event_loop_is_never_held_up(pool):
    lags = []

    async def tick():
        while True:
            start = asyncio.get_running_loop().time()
            await asyncio.sleep(0.005)
            lags.append(asyncio.get_running_loop().time() - start - 0.005)

    ticking = asyncio.create_task(tick())
    for _ in range(5):
        async with await pool.acquire(episode_id="lag") as session:
            await session.run("import time\ntime.sleep(0.05)\nprint('x' * 10**6)")
    ticking.cancel()
    assert sorted(lags)[len(lags) // 2] < 0.05 and len(lags) > 20


async def test_an_image_that_a_cell_writes_is_listed_and_comes_out_whole(session):
    code = """
import os, struct, zlib
def chunk(kind, data): return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
rows = b"".join(b"\\0" + bytes([x, y, 128]) * 1 for y in range(4) for x in [y])
png = b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 4, 8, 2, 0, 0, 0))
png += chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
os.makedirs("plots", exist_ok=True)
open("plots/figure.png", "wb").write(png)
"""
    size = int((await session.run(code)).value)
    assert [(file.name, file.size) for file in await session.files()] == [("plots/figure.png", size)]
    data = await session.get("plots/figure.png")
    assert len(data) == size and data.startswith(b"\x89PNG") and b"IEND" in data[-12:]


async def test_a_figure_of_matplotlib_is_a_file(session):
    if (await session.run("import matplotlib.pyplot as plt", timeout_s=120)).status != "ok":
        pytest.skip("no matplotlib in this sandbox: build the image with `python -m sandbox.image --with matplotlib`")
    result = await session.run("plt.plot([1, 4, 9])\nplt.savefig('squares.png')\nplt.show()", timeout_s=120)
    assert result.status == "ok", result.stderr
    assert [file.name for file in await session.files()] == ["squares.png"]
    assert (await session.get("squares.png")).startswith(b"\x89PNG")


async def test_await_works_at_top_level_over_cells(session):
    assert (
        await session.run("import asyncio\nasync def f(x):\n    await asyncio.sleep(0.01)\n    return x")
    ).value is None
    result = await session.run("y = await f(20)\na, b = await asyncio.gather(f(1), f(2))\nprint(a, b)\ny + await f(1)")
    assert (result.status, result.stdout, result.value) == ("ok", "1 2\n", "21")
    assert (await session.run("[x async for x in (await f(i) for i in range(3))]")).value == "[0, 1, 2]"
    assert "ValueError: late" in (await session.run("async def g():\n    raise ValueError('late')\nawait g()")).stderr
    assert (await session.run("y")).value == "20"
