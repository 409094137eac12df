"""What a RayJob's status and its pods' say: the run's exit code, and what it waits for. And names that KubeRay would refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.test_launch import GPUS, config
from toolrl.app.launch import render, submission
from toolrl.app.launch.kuberay_jobs import exit_code, obstacles
from toolrl.errors import UserError


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        ({"jobStatus": "SUCCEEDED", "message": "Job finished successfully."}, 0, ""),
        (
            {"jobStatus": "FAILED", "message": "Job entrypoint command failed with exit code 3, last available logs"},
            3,
            "3",
        ),
        ({"jobStatus": "FAILED", "message": "Job entrypoint command failed with exit code -9. No logs"}, -9, "-9"),
        ({"jobStatus": "FAILED", "message": "The head was not found"}, 1, "head"),
        ({"jobStatus": "STOPPED"}, 1, "STOPPED"),
        ({"jobDeploymentStatus": "Failed", "reason": "ValidationFailed", "message": "name too long"}, 1, "too long"),
        ({}, 1, "has not run"),
    ],
)
def test_the_exit_code_is_the_runs(
    status: dict[str, Any], code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(status) == code
    assert said in capsys.readouterr().err


def pod(name: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": name}, "status": status}


def waiting(reason: str, message: str = "") -> list[dict[str, Any]]:
    return [{"name": "ray-head", "state": {"waiting": {"reason": reason, "message": message}}}]


def test_what_keeps_pods_from_running_is_said() -> None:
    no_room = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu."
    found = list(
        obstacles(
            [
                pod("learner", conditions=[{"type": "PodScheduled", "status": "False", "message": no_room}]),
                pod("head", containerStatuses=waiting("CreateContainerConfigError", 'secret "hub" not found')),
                pod("rollout", initContainerStatuses=waiting("ImagePullBackOff")),
                pod("starting", containerStatuses=waiting("ContainerCreating"), conditions=[]),
                pod("well", conditions=[{"type": "PodScheduled", "status": "True"}], containerStatuses=[{"name": "x"}]),
            ]
        )
    )
    assert found == [
        f"pod/learner: {no_room}",
        'pod/head, ray-head: CreateContainerConfigError: secret "hub" not found',
        "pod/rollout, ray-head: ImagePullBackOff: ",
    ]


@pytest.mark.parametrize("name", ["4b", "x" * 48])
def test_names_that_kuberay_would_refuse_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="begin with a letter; set name="):
        render(config(GPUS, tmp_path, f"name={name}"), "kuberay")


def test_a_name_is_written_as_kubernetes_writes_names(tmp_path: Path) -> None:
    *_, job = yaml.safe_load_all(render(config(GPUS, tmp_path, "name=Math_4B.2"), "kuberay").files["rayjob.yaml"])
    assert job["metadata"]["name"] == "math-4b-2"


def test_the_rayjob_is_the_last_object_and_lets_a_stopped_run_write_a_checkpoint(tmp_path: Path) -> None:
    """`kubectl apply --output=name` prints the last object's name last: the launch is remembered by it."""
    *_, job = yaml.safe_load_all(render(config(GPUS, tmp_path), "kuberay").files["rayjob.yaml"])
    assert job["kind"] == "RayJob"
    waits_s = int(yaml.safe_load(job["spec"]["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"])
    head = job["spec"]["rayClusterSpec"]["headGroupSpec"]["template"]["spec"]
    assert head["terminationGracePeriodSeconds"] > waits_s >= 60
    assert "stop-all" in json.dumps(head["containers"][0]["lifecycle"])


def test_ray_asks_for_no_token_where_none_is_wanted(tmp_path: Path) -> None:
    *_, job = yaml.safe_load_all(render(config(GPUS, tmp_path, "cluster.auth=none"), "kuberay").files["rayjob.yaml"])
    cluster = job["spec"]["rayClusterSpec"]
    assert "authOptions" not in cluster
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        environment = group["template"]["spec"]["containers"][0]["env"]
        assert {"name": "RAY_AUTH_MODE", "value": "disabled"} in environment


def test_a_run_whose_folder_only_the_pods_see_is_resumed_with_its_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from toolrl.app.cli import main

    wanted = config(GPUS, tmp_path, "loop.steps=77")
    submission.write(render(wanted, "kuberay"), wanted, tmp_path / submission.FOLDER / wanted.name)
    launch = ["launch", wanted.name, "--target", "kuberay", "--resume", "--runs-dir", str(tmp_path), "--dry-run"]
    with pytest.raises(SystemExit) as ended:
        main(launch)
    assert not ended.value.code
    printed = capsys.readouterr().out
    assert "steps: 77" in printed and f"name: {wanted.name}," in printed
