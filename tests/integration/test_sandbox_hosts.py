"""Sandbox hosts on a real Ray cluster: two of them on this machine, with local boxes; what dies, and who notices."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import statistics
import time

import pytest
import pytest_asyncio

from tests.requirements import need

need("ray")
import ray

from actors import host_link, sandbox_host_group
from actors.sandbox_host_group import SandboxHostGroup, SandboxHostsLost
from actors.sandbox_hosts import SandboxHosts
from actors.worker_setup import interpreter
from sandbox import FileRefused, PoolExhausted, SandboxConfig, SandboxError, SandboxPool
from toolrl import presets
from toolrl.config import ToolConfig
from toolrl.tools import InfraError, Toolbox
from toolrl.trajectory import ToolCall

pytestmark = [pytest.mark.ray, pytest.mark.asyncio(loop_scope="module")]
CONFIG = SandboxConfig(
    backend="process", min_sessions=1, max_sessions=3, timeout_s=30.0, acquire_deadline_s=60.0, run="hosts-test"
)


@pytest.fixture(scope="module", autouse=True)
def cluster():
    ray.init(
        address="local",
        num_cpus=3,
        resources={"sandbox": 3},
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=100 * 2**20,
        namespace="toolrl",
        runtime_env={"env_vars": {"PYTHONPATH": os.getcwd()}},
    )
    yield
    ray.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def group():
    group = await SandboxHostGroup.start(CONFIG, 2, lease_s=4.0, cpus=0.5)
    yield group
    await group.stop()


@pytest_asyncio.fixture(loop_scope="module")
async def hosts(group):
    assert await eventually(lambda: len(group.hosts) == 2, 60)
    async with SandboxHosts(CONFIG, owner="worker") as hosts:
        assert await eventually(lambda: sum(link.usable for link in hosts.links.values()) == 2, 60)
        yield hosts


async def eventually(condition, deadline_s=20.0):
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return True
        await asyncio.sleep(0.05)
    return False


async def sessions_of(group):
    return sum(stats["sessions"] for stats in await group.stats())


def host_of(session):
    return session._place.link


async def pid_of(link):
    return await link.actor.__ray_call__.remote(lambda _: os.getpid())


async def test_a_session_on_a_host_is_a_session(hosts):
    async with await hosts.acquire(episode_id="e", seed=5) as session:
        first = await session.run("import random\nx = random.random()\nprint('hi')\nx")
        assert (first.status, first.stdout) == ("ok", "hi\n") and first.queue_s > 0
        assert (await session.run("x")).value == first.value
        assert (await session.run("1 / 0")).status == "error"
        timed_out = await session.run("while True: pass", timeout_s=0.3)
        assert timed_out.status == "timeout" and timed_out.state_lost
        data = os.urandom(3 * 2**20)
        await session.put("in.bin", data)
        assert [(file.name, file.size) for file in await session.files()] == [("in.bin", len(data))]
        assert await session.get("in.bin") == data
        with pytest.raises(FileRefused):
            await session.get("../etc/passwd")
        assert "refused" in (await session.run("#" * (2 * 2**20))).stderr
    with pytest.raises(SandboxError, match="released"):
        await session.run("1")
    async with await hosts.acquire(episode_id="again", seed=5) as session:
        assert (await session.run("import random\nrandom.random()")).value == first.value


async def test_sessions_spread_over_the_hosts_and_wait_when_all_are_full(hosts, group):
    held = [await hosts.acquire(episode_id=f"e{index}") for index in range(6)]
    assert sorted(stats["sessions"] for stats in await group.stats()) == [3, 3]
    with pytest.raises(PoolExhausted, match="2 sandbox hosts"):
        await hosts.acquire(episode_id="late", deadline_s=0.5)
    waiting = [asyncio.create_task(hosts.acquire(episode_id=f"w{index}")) for index in range(3)]
    await asyncio.sleep(0.3)
    for session in held:
        await session.release()
    for session in await asyncio.gather(*waiting):
        assert (await session.run("1")).status == "ok"
        await session.release()
    assert await eventually(lambda: _is_zero(group))


async def _is_zero(group):
    return await sessions_of(group) == 0


async def test_one_who_waits_goes_where_there_is_room(hosts, group):
    held = [await hosts.acquire(episode_id=f"e{index}") for index in range(6)]
    waiting = [asyncio.create_task(hosts.acquire(episode_id=f"w{index}")) for index in range(2)]  # one at each host
    await asyncio.sleep(0.3)
    on_one = [session for session in held if host_of(session) is host_of(held[0])]
    for session in on_one:
        await session.release()
    for session in await asyncio.wait_for(asyncio.gather(*waiting), 20):
        await session.release()
    for session in held:
        await session.release()


async def test_a_cancelled_run_and_a_cancelled_wait_leave_nothing(hosts, group):
    held = [await hosts.acquire(episode_id=f"e{index}") for index in range(6)]
    waiting = asyncio.create_task(hosts.acquire(episode_id="w"))
    running = asyncio.create_task(held[0].run("x = 1\nimport time\ntime.sleep(60)", timeout_s=60.0))
    await asyncio.sleep(0.5)
    for task in (waiting, running):
        task.cancel()
    await asyncio.gather(waiting, running, return_exceptions=True)
    after = await asyncio.wait_for(held[0].run("'x' in globals()"), 20)
    assert after.value == "False" and after.state_lost
    for session in held:
        await session.release()
    assert await eventually(lambda: _is_zero(group))


async def test_a_slow_host_holds_up_nobody(hosts):
    slow, quick = [await hosts.acquire(episode_id=name) for name in ("slow", "quick")]
    assert host_of(slow) is not host_of(quick)
    pid = await pid_of(host_of(slow))
    os.kill(pid, signal.SIGSTOP)
    try:
        stuck = asyncio.create_task(slow.run("1"))
        lags = []
        for _ in range(30):
            started = time.monotonic()
            assert (await quick.run("1")).value == "1"
            await asyncio.sleep(0.001)
            lags.append(time.monotonic() - started)
        assert max(lags) < 2.0 and not stuck.done()
        fresh = [await asyncio.wait_for(hosts.acquire(episode_id=f"f{index}"), 20) for index in range(2)]
        for session in fresh:
            await session.release()
    finally:
        os.kill(pid, signal.SIGCONT)
    assert (await asyncio.wait_for(stuck, 20)).status in ("ok", "infra_error")
    for session in (slow, quick):
        await session.release()


async def test_a_host_that_dies_costs_its_episodes_only_and_is_replaced(hosts, group):
    toolbox = Toolbox.build([ToolConfig("python", timeout_s=20.0)], interpreter=hosts, seed=0)
    replaced = group.restarts

    async def episode(number):
        """Outcome of three calls in a row, as an episode makes them."""
        try:
            async with toolbox.session(f"episode-{number}") as tools:
                for step in range(3):
                    code = f"import time\ntime.sleep(0.1)\nx = {number} if {step} == 0 else x + 1\nx"
                    result = await tools.call(ToolCall("c", "python", {"code": code}))
                    assert result.status == "ok" and result.text == str(number + step)
            return "ok"
        except InfraError:
            return "infra_error"

    victim = await hosts.acquire(episode_id="victim")
    running = asyncio.create_task(victim.run("import time\ntime.sleep(30)"))
    episodes = [asyncio.create_task(episode(number)) for number in range(24)]
    await asyncio.sleep(0.6)
    os.kill(await pid_of(host_of(victim)), signal.SIGKILL)
    died = await asyncio.wait_for(running, 15)
    assert died.status == "infra_error" and died.state_lost and "died" in died.note
    outcomes = await asyncio.wait_for(asyncio.gather(*episodes), 90)
    assert outcomes.count("infra_error") <= 3 and outcomes.count("ok") >= 21
    assert (await victim.run("1 + 1")).value == "2"  # elsewhere, anew
    await victim.release()
    assert await eventually(lambda: len(group.hosts) == 2 and group.restarts > replaced, 60)
    assert await eventually(lambda: sum(link.usable for link in hosts.links.values()) == 2, 60)


async def test_a_host_that_stays_silent_is_given_up_and_replaced(hosts, group):
    session = await hosts.acquire(episode_id="e")
    pid, replaced = await pid_of(host_of(session)), group.restarts
    os.kill(pid, signal.SIGSTOP)
    result = await asyncio.wait_for(session.run("1"), 3 * host_link.MISSES * host_link.SILENT_S)
    assert result.status == "infra_error"
    assert await eventually(lambda: group.restarts > replaced and len(group.hosts) == 2, 60)
    await session.release()


async def _value(ref):
    return await ref


async def test_containers_of_a_killed_host_end_with_it():
    need("docker")
    from sandbox.reaper import list_boxes

    def boxes():
        return [box for box in list_boxes() if box.run == "hosts-docker"]

    config = dataclasses.replace(CONFIG, backend="docker", min_sessions=2, run="hosts-docker")
    group = await SandboxHostGroup.start(config, 1, cpus=0.5)
    try:
        async with SandboxHosts(config, owner="worker") as hosts:
            session = await hosts.acquire(episode_id="e")
            assert (await session.run("6 * 7")).value == "42"
            before = {box.id for box in await asyncio.to_thread(boxes)}
            assert len(before) >= 2
            os.kill(await pid_of(host_of(session)), signal.SIGKILL)
            assert await eventually(lambda: not before & {box.id for box in boxes()}, 5)
            assert await eventually(lambda: _runs(session), 40)
            await session.release()
    finally:
        await group.stop()
    assert await eventually(lambda: not boxes(), 5)


async def _runs(session):
    return (await session.run("1 + 1")).value == "2"


@ray.remote(num_cpus=0)
class Worker:
    """Holds sessions as a rollout worker does."""

    async def hold(self, count):
        self.hosts = await SandboxHosts(CONFIG, owner="vanishing").__aenter__()
        self.sessions = [await self.hosts.acquire(episode_id=f"v{index}") for index in range(count)]
        self.running = asyncio.create_task(self.sessions[0].run("import time\ntime.sleep(600)", timeout_s=600.0))
        await asyncio.sleep(0.2)
        return os.getpid()


async def test_a_worker_that_vanishes_holds_nothing(group):
    worker = Worker.remote()
    pid = await worker.hold.remote(3)
    assert await sessions_of(group) == 3
    await asyncio.sleep(5.0)  # longer than the lease: it lives, and beats
    assert await sessions_of(group) == 3
    os.kill(pid, signal.SIGKILL)
    assert await eventually(lambda: _is_zero(group), 15)
    stats = await group.stats()
    assert all(each["in_use"] == 0 for each in stats)


async def test_a_worker_that_closes_leaves_its_sessions_at_once(group):
    async with SandboxHosts(CONFIG, owner="closing") as hosts:
        await hosts.acquire(episode_id="left")
        assert await sessions_of(group) == 1
    assert await eventually(lambda: _is_zero(group), 2)


async def test_no_hosts_and_hosts_without_a_backend_are_told():
    nobody = SandboxConfig(backend="process", run="nobody", acquire_deadline_s=1.0)
    with pytest.raises(SandboxError, match="no sandbox host of run nobody"):
        async with SandboxHosts(nobody, owner="w"):
            pass
    broken = SandboxConfig(backend="docker", image="no-such-image:never", run="broken")
    with pytest.raises(SandboxHostsLost, match="did not start"):
        await SandboxHostGroup.start(broken, 1, cpus=0.5)


async def test_a_run_without_hosts_left_ends_with_the_reason(monkeypatch):
    monkeypatch.setattr(sandbox_host_group, "MAX_RESTARTS", 1)
    group = await SandboxHostGroup.start(dataclasses.replace(CONFIG, run="doomed"), 1, cpus=0.5)
    try:
        watching = asyncio.create_task(group.watch())
        group.config = dataclasses.replace(CONFIG, run="doomed", backend="docker", image="no-such-image:never")
        await asyncio.sleep(0.1)
        assert not watching.done()
        ray.kill(group.hosts[0])
        with pytest.raises(SandboxHostsLost, match=r"no sandbox host is left.*no-such-image"):
            await asyncio.wait_for(watching, 60)
    finally:
        await group.stop()


def test_the_config_says_where_a_workers_python_runs():
    def where(*overrides):
        return type(interpreter(presets.load("quickstart-cpu", list(overrides))))

    assert where() is SandboxPool and where("placement.sandbox=hosts") is SandboxHosts
    assert where("placement.sandbox=hosts", "tools=[calculator]") is SandboxPool  # nobody starts hosts for it


async def test_the_hop_to_a_host_is_measured(hosts):
    async def p50(call):
        times = []
        for _ in range(200):
            started = time.perf_counter()
            await call()
            times.append(time.perf_counter() - started)
        return 1e3 * statistics.median(times)

    async with await hosts.acquire(episode_id="hop") as session:
        hosted = await p50(lambda: session.run("1"))
        actor = host_of(session).actor
        bare = await p50(lambda: _value(actor.beat.remote("bare")))
    async with SandboxPool(CONFIG) as pool, await pool.acquire(episode_id="here") as session:
        local = await p50(lambda: session.run("1"))
    print(
        f"\nround trip p50: {local:.2f} ms in the worker, {hosted:.2f} ms on a host; a bare call of Ray {bare:.2f} ms"
    )
    assert hosted - local < 4 * bare + 2, "the way to a host costs a call of Ray and little more"
