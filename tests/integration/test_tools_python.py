"""The tool `python` on the real sandbox, with whichever backend this machine has."""

import asyncio

import pytest

from sandbox import SandboxConfig, SandboxPool
from toolrl.config import ToolConfig
from toolrl.tools import InfraError, Toolbox
from toolrl.tools.python import STATE_LOST
from toolrl.trajectory import ToolCall


@pytest.fixture
async def pool():
    async with SandboxPool(SandboxConfig(backend="auto", min_sessions=1, max_sessions=4)) as pool:
        yield pool


def box(pool, timeout_s=5.0, **options):
    return Toolbox.build([ToolConfig("python", timeout_s=timeout_s, options=options)], interpreter=pool, seed=0)


def run(code):
    return ToolCall("call_0", "python", {"code": code})


async def test_variables_live_as_long_as_the_episode_and_no_longer(pool):
    toolbox = box(pool, error_lines=1)
    async with toolbox.session("one") as one, toolbox.session("two") as two:
        assert (await one.call(run("x = 6 * 7"))).text == "(no output)"
        assert (await one.call(run("print('so'); x"))).text == "so\n42"
        other = await two.call(run("x"))
        assert (other.status, other.text) == ("error", "NameError: name 'x' is not defined")
    async with toolbox.session("three") as three:
        assert (await three.call(run("x"))).status == "error"


async def test_an_error_shows_its_traceback_and_keeps_the_state(pool):
    async with box(pool).session("one") as tools:
        failed = await tools.call(run("y = 1\nprint('before')\n1 / 0"))
        assert failed.status == "error"
        assert failed.text.startswith("before\n")
        assert failed.text.endswith("ZeroDivisionError: division by zero")
        assert (await tools.call(run("y"))).text == "1"


async def test_a_result_tells_what_its_run_took(pool):
    async with box(pool).session("one") as tools:
        result = await tools.call(run("import time\nwhile time.process_time() < 0.1: pass\nprint('x' * 999)"))
    assert result.cpu_s > 0.05 and result.wall_s > 0.05 and result.output_bytes == 1000


async def test_a_timeout_is_told_with_the_state_that_it_cost(pool):
    async with box(pool, timeout_s=0.5).session("one") as tools:
        result = await tools.call(run("z = 1\nwhile True: pass"))
        assert result.status == "timeout"
        assert result.text.splitlines()[0] == "Error: the code did not finish within 0.5 s"
        lost = STATE_LOST in result.text
        assert (await tools.call(run("z"))).status == ("error" if lost else "ok")


async def test_calls_at_once_run_in_their_order(pool):
    async with box(pool).session("one") as tools:
        await tools.call(run("seen = []"))
        await asyncio.gather(*(tools.call(run(f"seen.append({i})")) for i in range(5)))
        assert (await tools.call(run("seen"))).text == "[0, 1, 2, 3, 4]"


async def test_no_interpreter_is_taken_before_the_first_valid_call(pool):
    async with box(pool).session("one") as tools:
        assert (await tools.call(ToolCall("c", "python", {"source": "1"}))).status == "invalid_call"
        assert pool.stats().acquired == 0
        assert (await tools.call(run("1"))).text == "1"
        assert pool.stats().acquired == 1


async def test_a_sandbox_that_is_gone_is_an_infrastructure_error():
    async with SandboxPool(SandboxConfig(backend="auto", min_sessions=1, max_sessions=1)) as pool:
        toolbox = box(pool)
    async with toolbox.session("one") as tools:
        with pytest.raises(InfraError, match="no interpreter for episode one"):
            await tools.call(run("1"))


async def test_files_of_a_folder_lie_in_every_episodes_work_folder(pool, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "prices.csv").write_text("1,2\n3,4\n")
    toolbox = box(pool, files=str(tmp_path))
    read = run("text = open('data/prices.csv').read()\nopen('data/prices.csv', 'w').write('')\ntext")
    for episode in ("one", "two"):
        async with toolbox.session(episode) as tools:
            assert (await tools.call(read)).text == repr("1,2\n3,4\n")


async def test_files_that_the_sandbox_refuses_are_an_infrastructure_error(pool, tmp_path):
    (tmp_path / "big").write_bytes(bytes(pool.config.max_file_bytes + 1))
    async with box(pool, files=str(tmp_path)).session("one") as tools:
        with pytest.raises(InfraError, match="big could not be put"):
            await tools.call(run("1"))
