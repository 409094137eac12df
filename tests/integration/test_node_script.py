"""What starts every node of a cluster, deploy/docker/node.sh, under real signals with a real Ray."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.requirements import need

need("ray", "netns")

from tests.integration.net_hosts import Host, hosts

NODE = Path(__file__).parents[2] / "deploy" / "docker" / "node.sh"
# Says when it runs and what it is told; ends with a code of its own when it is told twice.
COMMAND = """
told=0
trap 'told=$((told + 1)); echo "told $told"' TERM
echo "joined $RAY_ADDRESS"
while [ "$told" -lt 2 ]; do sleep 0.1; done
exit 7
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.fixture
def host() -> Iterator[Host]:
    with hosts("node") as made:
        yield made["node"]


def start_head(host: Host, nodes: int, files: str, log: Path) -> subprocess.Popen[bytes]:
    flags = ["--num-cpus=1", "--object-store-memory=100000000"]
    words = ["bash", str(NODE), "head", str(nodes), *flags, "--", "bash", "-c", COMMAND]
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    return host.run(words, log, {"PATH": path, "TOOLRL_NODE_ADDRESS": host.address, "TOOLRL_RAY_FILES": files})


def wait_until(what: str, done: Callable[[], bool], log: Path) -> None:
    ends = time.monotonic() + 180
    while not done():
        assert time.monotonic() < ends, f"{what} did not come; {log.read_text()[-3000:]}"
        time.sleep(0.1)


def test_a_head_hands_signals_to_its_command_and_ends_with_its_code(host: Host, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with tempfile.TemporaryDirectory(dir="/tmp") as files:
        head = start_head(host, 1, files, log)
        wait_until("the command", lambda: f"joined {host.address}:6379" in log.read_text(), log)
        for times in (1, 2):
            head.send_signal(signal.SIGTERM)
            wait_until(f"signal {times}", lambda said=f"told {times}": said in log.read_text(), log)
        assert head.wait(60) == 7
        assert_nothing_is_left(host, files)


def test_a_head_that_is_told_to_end_before_there_is_a_cluster_ends_well(host: Host, tmp_path: Path) -> None:
    log = tmp_path / "log"
    with tempfile.TemporaryDirectory(dir="/tmp") as files:
        head = start_head(host, 2, files, log)
        wait_until("the wait", lambda: "1 of 2 nodes are there" in log.read_text(), log)
        head.send_signal(signal.SIGTERM)
        assert head.wait(60) == 0
        assert "told to end before there was a cluster" in log.read_text()
        assert_nothing_is_left(host, files)


def assert_nothing_is_left(host: Host, files: str) -> None:
    processes = [psutil.Process(pid) for pid in host.pids()]
    _, alive = psutil.wait_procs(processes, timeout=20)
    assert not alive, [process.cmdline() for process in alive]
    assert not list(Path(files).iterdir())
