"""`toolrl sandbox` and `toolrl doctor` with the real interpreter service."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sandbox import SandboxConfig
from sandbox.selfcheck import run_checks
from tests.requirements import need


def toolrl(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from toolrl.app.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, input=text)


@pytest.mark.docker
def test_the_docker_backend_passes_its_own_check() -> None:
    need("docker")
    done = toolrl("sandbox", "check", "--backend", "docker")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "43 promises kept, 0 broken" in done.stdout and "an engine answers" in done.stdout


@pytest.mark.docker
def test_gvisor_passes_the_check_of_what_it_promises() -> None:
    need("docker", "runsc")
    done = toolrl("sandbox", "check", "--backend", "docker", "--runtime", "runsc")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "38 promises kept, 0 broken" in done.stdout and done.stdout.count("not promised") == 5


def test_the_process_backend_passes_its_own_check() -> None:
    need("bubblewrap")
    done = toolrl("sandbox", "check", "--backend", "process")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "39 promises kept, 0 broken" in done.stdout and done.stdout.count("not promised") == 4


async def test_a_promise_that_does_not_hold_is_found() -> None:
    need("bubblewrap")
    config = SandboxConfig(backend="process", confinement="bubblewrap", pids=150, work_mib=600, memory_mib=700)
    broken = {finding.promise async for finding in run_checks(config) if finding.outcome == "BROKEN"}
    assert broken == {"processes are bounded", "files are bounded in size"}


def test_a_cell_is_run_and_its_status_is_the_exit_code(tmp_path: Path) -> None:
    need("bubblewrap")
    backend = ("--backend", "process")
    fine = toolrl("sandbox", "run", "print('a')\n6 * 7", *backend)
    assert (fine.returncode, fine.stdout) == (0, "a\n42\n")
    (tmp_path / "cell.py").write_text("1 / 0")
    wrong = toolrl("sandbox", "run", "--file", str(tmp_path / "cell.py"), *backend)
    assert wrong.returncode == 1 and "ZeroDivisionError" in wrong.stderr and "error" in wrong.stderr
    endless = toolrl("sandbox", "run", "-", "--timeout", "0.5", *backend, text="while True: pass")
    assert endless.returncode == 1 and "timeout" in endless.stderr


@pytest.mark.docker
def test_containers_are_listed_and_only_orphans_are_reaped() -> None:
    need("docker")
    assert toolrl("sandbox", "ps", "--run", "no-such-run").stdout.strip() == "no containers of the sandbox"
    assert toolrl("sandbox", "reap", "--run", "no-such-run").stdout.strip() == "0 removed"


def test_an_image_that_cannot_be_built_is_a_mistake_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    done = toolrl("sandbox", "build")
    assert done.returncode == 2 and "was not built" in done.stderr and "Traceback" not in done.stderr
    told = toolrl("doctor")
    assert "no answer" in told.stdout and "process" in told.stdout


@pytest.mark.docker
def test_figures_are_taken_in_one_run_with_their_limits_and_peers() -> None:
    need("docker")
    done = toolrl("sandbox", "bench", "--backend", "docker", "--boxes", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    cells = [[cell.strip() for cell in line.split("│")] for line in done.stdout.splitlines() if line.startswith("│")]
    figures = {row[1]: row[2] for row in cells}
    for ratio in ("cold create / started `cat`", "cell / bare echo", "docker exec / cell", "new process / cell"):
        assert float(figures[ratio]) > 1, ratio
    assert 0 < float(figures["acquire a warm box"]) < float(figures["release, reset, acquire again"])
    assert float(figures["2 boxes: cells a second and core"]) > 0
