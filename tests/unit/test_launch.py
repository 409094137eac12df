"""One cluster description, four launchers: what is rendered, refused, and kept out of files.

The golden files are for people to review; `TOOLRL_WRITE_GOLDEN=1 pytest tests/unit/test_launch.py` writes them anew.
"""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.requirements import need
from toolrl import presets
from toolrl.app.launch import render, submission
from toolrl.app.launch.kuberay import ray_version
from toolrl.app.launch.nodes import groups, ray_flags, resources
from toolrl.config import RunConfig
from toolrl.errors import ConfigError, UserError

GOLDEN = Path(__file__).parents[1] / "golden" / "launch"
GPUS = """
base: math-4b
name: math-4b
runs_dir: /runs
placement: {sandbox: hosts, sandbox_hosts: 2}
sandbox: {image: "lab/toolrl-sandbox:1"}
cluster:
  image: lab/toolrl:gpu
  mounts: [{target: /runs, source: toolrl-runs}, {target: /models, source: models, read_only: true}]
  environment: {NCCL_DEBUG: WARN}
  secrets: [{variable: HF_TOKEN, name: hub, key: token}]
  runtime_class: gvisor
  account: lab
  groups:
    - {name: head, cpus: 16, memory_gib: 64, partition: cpu}
    - {name: learner, cpus: 48, memory_gib: 256, gpus: 2, gpu_type: h100, partition: gpu, selector: {pool: h100}}
    - {name: rollout, cpus: 48, memory_gib: 256, gpus: 6, gpu_type: h100, partition: gpu, selector: {pool: h100}}
    - {name: sandbox, nodes: 2, cpus: 32, memory_gib: 64, partition: cpu}
"""
LAPTOP = """
base: quickstart-cpu
name: try-out
runs_dir: /runs
placement: {sandbox: hosts}
cluster:
  mounts: [{target: /runs, source: /srv/runs}]
"""
HOSTS = """
base: quickstart-cpu
name: by-hand
runs_dir: /runs
cluster:
  mounts: [{target: /runs, source: /runs}]
  groups:
    - {name: head, cpus: 4, hosts: [10.0.0.1]}
    - {name: rollout, nodes: 2, cpus: 4, hosts: [10.0.0.2, 10.0.0.3]}
"""


def config(text: str, tmp_path: Path, *changes: str) -> RunConfig:
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return presets.load(str(path), changes)


@pytest.mark.parametrize(
    ("text", "target"), [(GPUS, "kuberay"), (GPUS, "slurm"), (LAPTOP, "compose"), (LAPTOP, "slurm"), (HOSTS, "ray")]
)
def test_rendered_files_are_those_that_were_reviewed(text: str, target: str, tmp_path: Path) -> None:
    wanted = config(text, tmp_path)
    files = {name: each for name, each in render(wanted, target).files.items() if name not in ("run.yaml", "node.sh")}
    for name, rendered in files.items():
        golden = GOLDEN / f"{wanted.name}-{name}"
        rendered = rendered.replace(ray_version(), "RAY_VERSION") if target == "kuberay" else rendered
        # Settings of the run itself stand in the manifest too and change with the presets: what is reviewed is the rest.
        rendered = _without_settings(rendered) if target == "kuberay" else rendered
        if os.environ.get("TOOLRL_WRITE_GOLDEN"):
            golden.write_text(rendered)
        assert rendered == golden.read_text(), f"{golden} differs; look at it, then write it anew (see above)"


def _without_settings(text: str) -> str:
    head, _, rest = text.partition("  run.yaml: |\n")
    return head + "  run.yaml: SETTINGS\n---\n" + rest.partition("\n---\n")[2]


def test_the_run_inside_joins_the_cluster_with_the_same_settings(tmp_path: Path) -> None:
    wanted = config(GPUS, tmp_path)
    inside = tmp_path / "inside.yaml"
    inside.write_text(render(wanted, "slurm").files["run.yaml"])
    found = presets.load(str(inside))
    assert (found.placement.ray_address, found.quiet) == ("auto", True)
    found.placement.ray_address, found.quiet = wanted.placement.ray_address, wanted.quiet
    assert found == wanted
    embedded = next(yaml.safe_load_all(render(wanted, "kuberay").files["rayjob.yaml"]))["data"]["run.yaml"]
    assert embedded.strip() == inside.read_text().strip()


def test_nodes_are_derived_from_the_placement(tmp_path: Path) -> None:
    derived = groups(presets.load("math-4b"))
    assert [(group.name, group.nodes, group.gpus) for group in derived] == [
        ("head", 1, 0),
        ("learner", 1, 2),
        ("rollout", 1, 6),
    ]
    large = groups(presets.load("math-4b", ["rollout.workers=24", "learner.ranks=16"]))
    assert [(group.nodes, group.gpus) for group in large] == [(1, 0), (2, 8), (3, 8)]
    assert resources(large)["GPU"] == 40
    assert "--resources={" in " ".join(ray_flags(large[1]))


def test_a_cluster_that_does_not_hold_the_run_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"GPU: needs 34 .* there are 8"):
        render(config(GPUS, tmp_path, "rollout.workers=32"), "slurm")
    with pytest.raises(UserError, match=r"takes 16 GPUs of one node, and the largest has 8; spread .*engine\.nodes"):
        groups(presets.load("agent-32b", ["engine.tensor_parallel=16"]))
    spread = groups(presets.load("agent-32b", ["engine.tensor_parallel=16", "engine.nodes=2", "rollout.workers=2"]))
    assert [(group.name, group.nodes, group.gpus) for group in spread[1:3]] == [("learner", 3, 8), ("rollout", 4, 8)]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["cluster.environment={MY_API_KEY: x}"], "list it under cluster.secrets"),
        (["cluster.groups=[{name: rollout}]"], "needs a group `head`"),
        (["cluster.groups=[{name: head}, {name: head}]"], "given twice"),
        (["cluster.groups=[{name: head, nodes: 2}]"], "is one node"),
        (["cluster.groups=[{name: Head}]"], "lower-case"),
        (["cluster.groups=[{name: head, cpus: 0}]"], "at least 1"),
        (["cluster.time_limit=1 day"], "HOURS:MINUTES:SECONDS"),
        (["placement.ray_address=ray://head:10001"], "HOST:PORT of a Ray cluster"),
        (["cluster.mounts=[{target: runs, source: x}]"], "absolute target"),
        (["cluster.secrets=[{variable: 'A B'}]"], "no name of an environment variable"),
        (["cluster.groups=[{name: head, hosts: [node-1]}]"], "must be addresses"),
    ],
)
def test_descriptions_that_cannot_work_are_refused(changes: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=said):
        config(LAPTOP, tmp_path, *changes)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("24:00:00", "24:00:00"), ("5400", "1:30:00"), ("2-00:00:00", "2-00:00:00"), ("0:07:00", "0:07:00")],
)
def test_slurm_is_told_the_time_limit_that_was_meant(given: str, wanted: str, tmp_path: Path) -> None:
    """YAML reads 24:00:00 as a number of seconds, and Slurm a number as minutes."""
    rendered = render(config(LAPTOP, tmp_path, f"cluster.time_limit={given}"), "slurm")
    assert f"#SBATCH --time={wanted}\n" in rendered.files["run.sbatch"]


def test_a_run_that_its_nodes_cannot_share_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="lies on no mount that all nodes share"):
        render(config(LAPTOP, tmp_path, "runs_dir=/home/me/runs"), "compose")
    with pytest.raises(UserError, match="no PersistentVolumeClaim's name"):
        render(config(LAPTOP, tmp_path), "kuberay")
    with pytest.raises(UserError, match="unknown launch target"):
        render(config(LAPTOP, tmp_path), "kubray")


def test_no_secret_and_no_open_port_is_in_any_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    wanted = config(GPUS, tmp_path, "cluster.mounts=[{target: /runs, source: /srv/runs}]")
    claim = config(GPUS, tmp_path, "cluster.mounts=[{target: /runs, source: runs}]")
    with pytest.raises(UserError, match="HF_TOKEN cannot go with the job"):
        render(wanted, "ray")
    for target in ("kuberay", "slurm", "compose"):
        rendered = render(claim if target == "kuberay" else wanted, target)
        for name, text in rendered.files.items():
            assert "hf_very_secret" not in text, name
            assert "0.0.0.0" not in text, name
    compose = yaml.safe_load(render(wanted, "compose").files["compose.yaml"])
    assert all("ports" not in service for service in compose["services"].values())
    assert "dashboard-host=127.0.0.1" in (GOLDEN.parents[2] / "deploy/docker/node.sh").read_text()


def pods(manifest: str) -> dict[str, dict[str, Any]]:
    """Group name -> pod spec."""
    spec = list(yaml.safe_load_all(manifest))[-1]["spec"]["rayClusterSpec"]
    templates = [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    return {each["metadata"]["labels"]["toolrl/group"]: each["spec"] for each in templates}


def test_pods_are_hardened_and_sandboxes_stay_off_gpu_nodes(tmp_path: Path) -> None:
    found = pods(render(config(GPUS, tmp_path), "kuberay").files["rayjob.yaml"])
    assert set(found) == {"head", "learner", "rollout", "sandbox"}
    for name, pod in found.items():
        assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"], name
        ours = pod["containers"][0]
        assert ours["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        gpus = int(ours["resources"]["limits"].get("nvidia.com/gpu", 0))
        assert gpus == {"learner": 2, "rollout": 6}.get(name, 0)
        privileged = [each["name"] for each in pod["containers"] if each["securityContext"].get("privileged")]
        assert privileged == (["docker"] if name == "sandbox" else [])
        token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
        assert (token in ours["env"]) == (name != "sandbox")
        assert any("persistentVolumeClaim" in volume for volume in pod["volumes"]) == (name != "sandbox")
    assert found["sandbox"]["runtimeClassName"] == "gvisor"
    assert found["sandbox"]["tolerations"][0]["key"] == "toolrl/sandbox" and "affinity" in found["sandbox"]


@pytest.mark.parametrize("text", [GPUS, LAPTOP])
def test_shell_parts_pass_shellcheck(text: str, tmp_path: Path) -> None:
    need("shellcheck")
    rendered = render(config(text, tmp_path), "slurm")
    for name in ("run.sbatch", "node.sh"):
        (tmp_path / name).write_text(rendered.files[name])
        done = subprocess.run(["shellcheck", tmp_path / name], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_token_is_fresh_and_nobody_elses(tmp_path: Path) -> None:
    wanted = config(LAPTOP, tmp_path)
    rendered = render(wanted, "compose")
    tokens = set()
    for name in ("one", "two"):
        submission.write(rendered, wanted, tmp_path / name)
        token = tmp_path / name / submission.TOKEN
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        tokens.add(token.read_text())
    assert len(tokens) == 2 and all(len(token) == 64 for token in tokens)


def test_a_launch_is_found_again_and_its_code_is_the_runs(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With a scheduler of three shell lines."""
    from toolrl.app.cli import main
    from toolrl.app.launch.target import Rendered, targets

    if "three-lines" not in targets:
        targets.register("three-lines")(
            lambda config: Rendered(
                files={"job.sh": "echo the run says hello; exit 3\n"},
                submit=["sh", "-c", "echo submitted job 7"],
                follow=["sh", "job.sh"],
                state=["echo", "RUNNING", "{id}"],
                stop=["touch", "stopped-{id}"],
            )
        )
    place = tmp_path / "runs"
    arguments = ["quickstart-cpu", f"runs_dir={place}", f"cluster.mounts=[{{target: {place}, source: x}}]"]
    assert _exit_code(main, ["launch", *arguments, "--target", "three-lines"]) == 3
    said = capfd.readouterr().out
    assert "submitted to three-lines as 7" in said and "the run says hello" in said
    folder = place / submission.FOLDER / "quickstart-cpu"
    assert json.loads((folder / submission.RECORD).read_text())["id"] == "7"
    assert _exit_code(main, ["status", "quickstart-cpu", "--runs-dir", str(place)]) == 0
    said = capfd.readouterr().out
    assert "three-lines: RUNNING 7" in said and "not begun" in said
    assert _exit_code(main, ["logs", "quickstart-cpu", "-f", "--runs-dir", str(place)]) == 3
    assert _exit_code(main, ["stop", "quickstart-cpu", "--runs-dir", str(place)]) == 0
    assert (folder / "stopped-7").exists()
    assert _exit_code(main, ["launch", *arguments, "--target", "three-lines", "--no-follow"]) == 0
    assert (place / submission.FOLDER / "quickstart-cpu-2" / submission.RECORD).is_file()


def _exit_code(main: Any, arguments: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    return int(ended.value.code or 0)


def test_a_scheduler_finds_files_that_are_named_from_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", f"mine.yaml{os.pathsep}/etc/theirs.yaml")
    said = submission.run(["sh", "-c", 'pwd; echo "$KUBECONFIG"'], tmp_path)
    assert said.split() == [str(tmp_path), f"{Path.cwd() / 'mine.yaml'}{os.pathsep}/etc/theirs.yaml"]


def test_a_scheduler_that_is_not_here_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no-such-scheduler is not installed here"):
        submission.run(["no-such-scheduler"], tmp_path)
    with pytest.raises(UserError, match="failed with exit code 4"):
        submission.run(["sh", "-c", "exit 4"], tmp_path)
