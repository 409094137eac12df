"""The files of deploy/, and what is rendered from its templates, against those who will read them: Kubernetes' schemas, KubeRay's
and Ray's, Compose, a shell's and a Dockerfile's checker. Nothing is started."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.requirements import need, tool
from tests.unit.test_launch import GPUS, HOSTS, LAPTOP, config
from toolrl import presets
from toolrl.app.launch import render, submission
from toolrl.app.launch.kuberay import JOB, STANDING
from toolrl.errors import UserError

REPOSITORY = Path(__file__).parents[2]
KUBERNETES = ("1.28", "1.37")  # the oldest and the newest that manifests are checked for
KUBERAY = yaml.safe_load((REPOSITORY / "tests" / "schemas" / "kuberay.yaml").read_text())
CLAIM = "cluster.mounts=[{target: /runs, source: toolrl-runs}]"
PRESETS = ("quickstart-cpu", "single-gpu-1.5b", "math-4b", "math-14b", "agent-32b")
SHELL = ("deploy/docker/node.sh", ".ci/run", "tests/wheel_check.sh")


def manifests(text: str, tmp_path: Path) -> list[dict[str, Any]]:
    """Of both files; `text` is a config or a preset's name."""
    wanted = presets.load(text, ["runs_dir=/runs", CLAIM]) if text in PRESETS else config(text, tmp_path)
    files = render(wanted, "kuberay").files
    return [document for name in (JOB, STANDING) for document in yaml.safe_load_all(files[name])]


def pod_templates(manifest: dict[str, Any]) -> Iterator[dict[str, Any]]:
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        yield {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "x"}, "template": group["template"]}


def test_manifests_are_what_kubernetes_and_kuberay_take(tmp_path: Path) -> None:
    need("kubernetes-validate")
    core = []
    for text in (GPUS, *PRESETS):
        found = manifests(text, tmp_path)
        theirs = [manifest for manifest in found if manifest["apiVersion"] == "ray.io/v1"]
        assert [manifest["kind"] for manifest in theirs] == ["RayJob", "RayCluster"]
        for manifest in theirs:
            jsonschema.validate(manifest, KUBERAY)
            core += pod_templates(manifest)
        core += [manifest for manifest in found if manifest not in theirs]
    for version in KUBERNETES:
        done = kubernetes(version, core, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert (done.stdout + done.stderr).count(" passed ") == len(core)


def kubernetes(version: str, documents: list[dict[str, Any]], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "core.yaml").write_text(yaml.safe_dump_all(documents))
    command = [tool("kubernetes-validate"), "--strict", f"--kubernetes-version={version}", tmp_path / "core.yaml"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda job: job["spec"].update(entryPoint="toolrl"),
        lambda job: job["metadata"].update(name="4b"),
        lambda job: job["metadata"].update(name="x" * 48),
        lambda job: job["spec"]["rayClusterSpec"].update(rayVersion="2.51.0"),
        lambda job: job["spec"]["rayClusterSpec"]["authOptions"].update(mode="tokens"),
        lambda job: job["spec"]["rayClusterSpec"]["headGroupSpec"]["rayStartParams"].update({"num-cpus": 4}),
        lambda job: job["spec"]["rayClusterSpec"]["workerGroupSpecs"][0].pop("minReplicas"),
        lambda job: job["spec"].update(submissionMode="Kubernetes"),
    ],
)
def test_the_schema_of_kuberay_refuses(spoil: Callable[[dict[str, Any]], object], tmp_path: Path) -> None:
    (job,) = (each for each in manifests(GPUS, tmp_path) if each["kind"] == "RayJob")
    spoil(job)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, KUBERAY)


def test_a_pod_with_a_wrong_word_is_refused(tmp_path: Path) -> None:
    need("kubernetes-validate")
    (job,) = (each for each in manifests(GPUS, tmp_path) if each["kind"] == "RayJob")
    head = next(pod_templates(job))
    head["template"]["spec"]["containers"][0]["livenessprobe"] = {}
    done = kubernetes(KUBERNETES[-1], [head], tmp_path)
    assert done.returncode != 0 and "livenessprobe" in done.stdout + done.stderr


def test_a_kubernetes_that_does_not_answer_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the real kubectl; the port is one that nobody listens at."""
    need("kubectl")
    context = {"name": "x", "context": {"cluster": "x", "user": "x"}}
    cluster = {"name": "x", "cluster": {"server": "https://127.0.0.1:1"}}
    settings = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "contexts": [context],
        "clusters": [cluster],
    }
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(settings | {"users": [{"name": "x", "user": {"token": "x"}}]}))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    wanted = config(GPUS, tmp_path)
    rendered = render(wanted, "kuberay")
    with pytest.raises(UserError, match=r"kuberay: .*127\.0\.0\.1:1 was refused"):
        submission.submit(rendered, wanted, "kuberay", tmp_path / "launch")
    assert not (tmp_path / "launch").exists()
    for command in (rendered.state, rendered.stop):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.count("\n") == 1 and "127.0.0.1:1 was refused" in done.stderr


def test_the_file_of_ray_up_is_what_ray_takes(tmp_path: Path) -> None:
    need("ray")
    ray = importlib.util.find_spec("ray")
    assert ray is not None and ray.origin is not None
    schema = json.loads((Path(ray.origin).parent / "autoscaler" / "ray-schema.json").read_text())
    file = yaml.safe_load(render(config(HOSTS, tmp_path), "ray").files["ray-cluster.yaml"])
    jsonschema.validate(file, schema)
    assert file["provider"] == {"type": "local", "head_ip": "10.0.0.1", "worker_ips": ["10.0.0.2", "10.0.0.3"]}
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(file | {"worker_start_commands": []}, schema)


def test_compose_reads_its_file(tmp_path: Path) -> None:
    need("docker-compose")
    wanted = config(LAPTOP, tmp_path)
    submission.write(render(wanted, "compose"), wanted, tmp_path)
    machine = {"TOOLRL_USER": "1000:1000", "DOCKER_GID": "999"}
    command = submission.resolved(["docker", "compose", "--file", "compose.yaml", "config", "--quiet"])
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | machine)
    assert done.returncode == 0, done.stderr


def test_shell_is_sound(tmp_path: Path) -> None:
    need("shellcheck")
    files = [REPOSITORY / name for name in SHELL]
    cluster = yaml.safe_load(render(config(HOSTS, tmp_path), "ray").files["ray-cluster.yaml"])
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        files.append(tmp_path / f"{name}.sh")
        files[-1].write_text("#!/bin/bash\n" + "\n".join(cluster[name]) + "\n")
    done = subprocess.run(["shellcheck", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_dockerfiles_are_sound() -> None:
    need("hadolint")
    files = [*sorted(REPOSITORY.glob("deploy/docker/*Dockerfile")), REPOSITORY / "sandbox" / "image" / "Dockerfile"]
    assert len(files) == 3
    # Which packages of which version a box has is for whoever builds its image to say (PACKAGES): DL3013.
    done = subprocess.run([tool("hadolint"), "--ignore=DL3013", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
