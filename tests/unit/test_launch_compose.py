"""What a Compose cluster asks of its machine, and how its run is followed, stopped and taken up again.

Where Docker has to answer, a `docker` of a few shell lines does.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.requirements import need
from toolrl import presets
from toolrl.app.cli import main
from toolrl.app.launch import compose_machine, render, submission
from toolrl.app.launch.compose_machine import make_mount, node_user, processors_suffice
from toolrl.config import RunConfig
from toolrl.config_cluster import GroupConfig
from toolrl.errors import UserError

NOBODY = (65534, 65534)
SETTINGS = """
base: quickstart-cpu
name: try-out
runs_dir: /runs/mine
placement: {sandbox: hosts, sandbox_hosts: 2}
cluster:
  mounts: [{target: /data, source: /srv/data, read_only: true}, {target: /runs, source: SOURCE}]
  secrets: [{variable: HF_TOKEN}]
  groups:
    - {name: head, cpus: 2, memory_gib: 4}
    - {name: learner, cpus: 2, memory_gib: 4}
    - {name: rollout, cpus: 2, memory_gib: 4}
    - {name: sandbox, nodes: 2, cpus: 2, memory_gib: 4}
"""
DOCKER = """#!/bin/sh
echo "$@" >>CALLS
case "$*" in
compose\\ version) exit 0 ;;
info*) echo 2 ;;
ps*--quiet*) echo 0123abcd ;;
ps*) cat THERE 2>/dev/null || true ;;
wait*) echo 3 ;;
logs*) echo the run says hello ;;
esac
"""


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    path = tmp_path / "try-out.yaml"
    path.write_text(SETTINGS.replace("SOURCE", str(tmp_path / "host")).replace("/srv/data", str(tmp_path)))
    return path


@pytest.fixture
def docker_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `docker` in front of the path; what it was asked lands in the file that this returns."""
    program = tmp_path / "bin" / "docker"
    program.parent.mkdir()
    calls = tmp_path / "calls"
    program.write_text(DOCKER.replace("CALLS", str(calls)).replace("THERE", str(tmp_path / "there")))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    (tmp_path / "docker.sock").touch()
    monkeypatch.setattr(compose_machine, "DOCKER_SOCKET", tmp_path / "docker.sock")
    return calls


def config(path: Path, *changes: str) -> RunConfig:
    return presets.load(str(path), changes)


def services(path: Path) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = yaml.safe_load(render(config(path), "compose").files["compose.yaml"])["services"]
    return found


def exit_code(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return int(ended.value.code or 0)


def test_the_head_is_stopped_before_the_nodes_that_its_run_needs(settings: Path) -> None:
    found = services(settings)
    assert set(found["head"]["depends_on"]) == set(found) - {"head"}
    assert all("depends_on" not in found[name] for name in found if name != "head")


def test_only_sandbox_nodes_hold_the_engine_and_no_node_is_root(settings: Path) -> None:
    for name, service in services(settings).items():
        assert ("docker.sock" in str(service["volumes"])) == name.startswith("sandbox")
        assert ("group_add" in service) == name.startswith("sandbox")
        assert service["user"].startswith("${TOOLRL_USER:?") and service["cap_drop"] == ["ALL"]
    uid, gid = node_user()
    assert uid != 0 and gid != 0


def test_compose_accepts_the_file_and_needs_no_secret_to_stop_the_run(settings: Path, tmp_path: Path) -> None:
    need("docker-compose")
    wanted = config(settings)
    submission.write(render(wanted, "compose"), wanted, tmp_path / "launch")
    (tmp_path / "launch" / ".env").write_text("TOOLRL_USER=1000:1000\nDOCKER_GID=0\n")
    command = ["docker-compose", "--file", "compose.yaml", "config"]
    environment = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    done = subprocess.run(
        command, cwd=tmp_path / "launch", capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    assert len(services) == 5
    for name, service in services.items():  # where boxes are, there is nothing worth stealing
        apart = name.startswith("sandbox")
        assert ("HF_TOKEN" in service["environment"]) != apart and "RAY_AUTH_MODE" in service["environment"]
        assert any(":/runs" in mount for mount in service["volumes"]) != apart


def test_more_processors_than_the_machine_has_are_refused_by_name() -> None:
    nodes = [GroupConfig(name="head", cpus=2), GroupConfig(name="sandbox", cpus=16)]
    processors_suffice(nodes, 16)
    with pytest.raises(UserError, match="this machine's 2: sandbox asks for 16"):
        processors_suffice(nodes, 2)


def test_a_mount_that_is_missing_becomes_the_nodes_own(tmp_path: Path) -> None:
    user = NOBODY if os.getuid() == 0 else (os.getuid(), os.getgid())
    make_mount(tmp_path / "a" / "b", user, writable=True)
    found = (tmp_path / "a" / "b").stat()
    assert (found.st_uid, found.st_gid) == user


def test_a_mount_that_the_nodes_may_not_write_is_refused(tmp_path: Path) -> None:
    others = tmp_path / "others"
    others.mkdir(mode=0o755)
    with pytest.raises(UserError, match=rf"user 65534, which may not write .*: chown 65534:65534 {others}"):
        make_mount(others, NOBODY, writable=True)
    make_mount(others, NOBODY, writable=False)
    others.chmod(0o777)
    make_mount(others, NOBODY, writable=True)


def test_a_mount_is_a_folder_of_the_machine(settings: Path) -> None:
    with pytest.raises(UserError, match="'runs' is no absolute path"):
        render(config(settings, "cluster.mounts=[{target: /runs, source: runs}]"), "compose")


def test_a_launch_lies_where_the_mount_comes_from(settings: Path, tmp_path: Path) -> None:
    wanted = config(settings)
    assert submission.folder_of(wanted, "compose") == tmp_path / "host" / "mine" / "launches" / "try-out"
    assert submission.folder_of(wanted, "slurm") == Path("/runs/mine/launches/try-out")


def test_a_run_is_followed_to_its_exit_code_and_taken_down(settings: Path, tmp_path: Path, docker_says: Path) -> None:
    assert exit_code("launch", str(settings), "--target", "compose") == 3
    folder = tmp_path / "host" / "mine" / "launches" / "try-out"
    asked = docker_says.read_text().splitlines()
    compose = "compose --project-name try-out --file compose.yaml"
    assert asked.index(f"{compose} up --detach") < asked.index("logs --follow 0123abcd")
    assert asked[-1] == f"{compose} down --timeout 300"
    variables = dict(line.split("=") for line in (folder / ".env").read_text().splitlines())
    assert set(variables) == {"TOOLRL_USER", "DOCKER_GID"}
    uid, gid = map(int, variables["TOOLRL_USER"].split(":"))
    for name in ("ray-token", "run.yaml"):
        assert ((folder / name).stat().st_uid, (folder / name).stat().st_gid) == (uid, gid)
    assert "hf_very_secret" not in "".join(path.read_text() for path in folder.iterdir())
    assert exit_code("stop", "try-out", "--runs-dir", str(tmp_path / "host" / "mine")) == 0
    assert docker_says.read_text().splitlines()[-1] == f"{compose} down --timeout 300"


def test_a_cluster_of_that_name_is_not_touched(
    settings: Path, tmp_path: Path, docker_says: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "there").write_text("try-out_head_1\n")
    assert exit_code("launch", str(settings), "--target", "compose") == 2
    assert "is there already (try-out_head_1)" in " ".join(capsys.readouterr().err.split())
    assert "up --detach" not in docker_says.read_text()


def test_a_refused_launch_takes_no_name(settings: Path, tmp_path: Path, docker_says: Path) -> None:
    assert exit_code("launch", str(settings), "--target", "compose", "cluster.groups.0.cpus=3") == 2
    assert exit_code("launch", str(settings), "--target", "compose") == 3
    assert [path.name for path in (tmp_path / "host" / "mine" / "launches").iterdir()] == ["try-out"]


def test_a_launched_run_goes_on_under_its_name_with_other_settings(
    settings: Path, tmp_path: Path, docker_says: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tmp_path / "host" / "mine"
    assert exit_code("launch", str(settings), "--target", "compose", "--no-follow") == 0
    (runs / "try-out").mkdir()
    inside = (runs / "launches" / "try-out" / "run.yaml").read_text()
    (runs / "try-out" / "config.yaml").write_text(inside)
    assert exit_code("stop", "try-out", "--runs-dir", str(runs)) == 0
    said = capsys.readouterr().out.partition("`toolrl ")[2].partition("`")[0]
    assert said == f"launch try-out --target compose --resume --runs-dir {runs}"
    assert exit_code(*said.split(), "loop.steps=7") == 3
    assert [path.name for path in (runs / "launches").iterdir()] == ["try-out"]
    now = presets.load(str(runs / "launches" / "try-out" / "run.yaml"))
    assert (now.name, now.runs_dir, now.loop.steps) == ("try-out", "/runs/mine", 7)


def test_no_compose_of_either_kind_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match="neither `docker compose` nor docker-compose is installed here"):
        submission.resolved(["docker", "compose", "up"])
