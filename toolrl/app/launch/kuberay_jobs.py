"""`python -m toolrl.app.launch.kuberay_jobs follow|state|stop NAMESPACE NAME`: one RayJob of Kubernetes, by kubectl.

The pod that submits a job to Ray comes only when the cluster is there, and its own exit code tells nothing: it ends with
`ray job logs`, which ends well whatever became of the job. How the run ended stands in the log's last line, or in the RayJob.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from toolrl.app.launch.ray_jobs import SAID

LOOK_EVERY_S = 2.0
REQUEST_TIMEOUT = "--request-timeout=30s"
FAILURES = 5  # of kubectl, one after the other, that are borne
JOB_SERVER = "http://127.0.0.1:8265"  # within the head's pod
NOT_TAKEN_UP = "waits for KubeRay's operator to take it up"
PATIENT_REASONS = {"ContainerCreating", "PodInitializing"}  # why a container does not run yet, without anything wrong


class KubectlError(Exception):
    """kubectl failed; says how."""


def follow(namespace: str, name: str) -> int:
    """Prints what the run prints, until it ends, and before that what it waits for; its exit code, or 1 where it had none or
    Kubernetes does not answer."""
    failures, said, since = 0, set[str](), list[str]()
    code: int | None = None
    while True:
        try:
            status = _status(namespace, name)
            pods = _pods(namespace, f"toolrl/run={name}")
            submitters = _pods(namespace, f"job-name={name}")
            failures = 0
        except KubectlError as error:
            failures += 1
            if failures == FAILURES:
                print(error, file=sys.stderr)
                return 1
            time.sleep(LOOK_EVERY_S)
            continue
        if status is None:
            print(f"rayjob/{name} is no longer there", file=sys.stderr)
            return 1 if code is None else code
        stage = status.get("jobDeploymentStatus") or NOT_TAKEN_UP
        for line in (f"rayjob/{name}: {stage}", *obstacles([*pods, *submitters])):
            if line not in said:
                said.add(line)
                print(line, flush=True)
        if any(pod["status"].get("phase") in ("Running", "Succeeded", "Failed") for pod in submitters):
            # Ends with the submitter's pod, or when the connection does: then once more, from there.
            lines, told = _print_log(namespace, name, since)
            code = code if told is None else told
            since = [f"--since-time={datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"] if lines else since
        if stage in ("Complete", "Failed"):
            return exit_code(status) if code is None else code
        time.sleep(LOOK_EVERY_S)


def _print_log(namespace: str, name: str, since: Sequence[str]) -> tuple[int, int | None]:
    """Of the submitter's pod, as long as it comes; how many lines came, and the exit code that the run's shell said there."""
    lines, told = 0, None
    logs = [*_kubectl(namespace), "logs", "--follow", *since, f"job/{name}"]
    with subprocess.Popen(logs, stdout=subprocess.PIPE, text=True, errors="replace") as printed:
        assert printed.stdout is not None
        for line in printed.stdout:
            print(line, end="", flush=True)
            lines += 1
            if line.startswith(SAID) and line.removeprefix(SAID).strip().isdigit():
                told = int(line.removeprefix(SAID))
    return lines, told


def obstacles(pods: Sequence[dict[str, Any]]) -> Iterator[str]:
    """What keeps pods from running: no machine has room, an image or a secret that is not there, a crash."""
    for pod in pods:
        name, status = pod["metadata"]["name"], pod["status"]
        for condition in status.get("conditions", []):
            if condition["type"] == "PodScheduled" and condition["status"] == "False":
                yield f"pod/{name}: {condition.get('message') or condition.get('reason')}"
        for container in [*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])]:
            waiting = container.get("state", {}).get("waiting", {})
            if waiting.get("reason", "ContainerCreating") not in PATIENT_REASONS:
                yield f"pod/{name}, {container['name']}: {waiting['reason']}: {waiting.get('message', '')}"


def exit_code(status: dict[str, Any]) -> int:
    """Of the run, from its RayJob's status; what went wrong is printed."""
    if status.get("jobStatus") == "SUCCEEDED":
        return 0
    message = status.get("message") or status.get("reason") or status.get("jobStatus") or "it has not run"
    print(message, file=sys.stderr)
    found = re.search(r"failed with exit code (-?\d+)", message)
    return (int(found.group(1)) or 1) if found else 1


def state(namespace: str, name: str) -> int:
    """Prints how it stands; nothing where there is no such RayJob."""
    there = state_of(namespace, name)
    if there is not None:
        print(there)
    return 0


def state_of(namespace: str, name: str) -> str | None:
    """In a line; None where there is no such RayJob. Raises KubectlError."""
    status = _status(namespace, name)
    if status is None:
        return None
    words = [status.get(key, "") for key in ("jobDeploymentStatus", "jobStatus")]
    message = status.get("message", "").partition("\n")[0]
    return " ".join(word for word in (*words, message) if word) or NOT_TAKEN_UP


def stop(namespace: str, name: str) -> int:
    """Lets the run write a checkpoint, then takes everything away."""
    _tell_the_run(namespace, name)
    parts = [f"rayjob/{name}", f"configmap/{name}-config"]
    parts += [f"networkpolicy/{name}-{each}" for each in ("nodes", "sandbox")]
    print(_run(namespace, ["delete", "--ignore-not-found", *parts]), end="")
    return 0


def _tell_the_run(namespace: str, name: str) -> None:
    """Ray's `stop` sends it TERM; returns when it has ended. Where no head runs there is nobody to tell."""
    status = _status(namespace, name) or {}
    if status.get("jobStatus") not in ("PENDING", "RUNNING"):
        return
    words = ["python", "-m", "toolrl.app.launch.ray_jobs", "stop", JOB_SERVER, status["jobId"]]
    for pod in _pods(namespace, f"ray.io/cluster={status.get('rayClusterName')},ray.io/node-type=head"):
        if pod["status"].get("phase") != "Running":
            continue
        try:
            _run(namespace, ["exec", pod["metadata"]["name"], "--container=ray-head", "--", *words])
        except KubectlError as error:
            raise KubectlError(
                f"{error}\nthe run could not be told to write a checkpoint; to end it without one: "
                f"kubectl --namespace {namespace} delete rayjob/{name}"
            ) from None


def _status(namespace: str, name: str) -> dict[str, Any] | None:
    """None where there is no such RayJob."""
    said = _run(namespace, ["get", f"rayjob/{name}", "--ignore-not-found", "--output=json", REQUEST_TIMEOUT])
    return json.loads(said).get("status", {}) if said.strip() else None


def _pods(namespace: str, selector: str) -> list[dict[str, Any]]:
    said = _run(namespace, ["get", "pods", f"--selector={selector}", "--output=json", REQUEST_TIMEOUT])
    found: list[dict[str, Any]] = json.loads(said)["items"]
    return found


def _run(namespace: str, words: Sequence[str]) -> str:
    """What kubectl prints. Raises KubectlError."""
    try:
        done = subprocess.run([*_kubectl(namespace), *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise KubectlError("kubectl is not installed here; `--dry-run` renders the files") from None
    if done.returncode:
        # Its library's own log lines, many and the same, go before what kubectl says.
        said = [line for line in done.stderr.splitlines() if line.strip() and not re.match(r"[EWIF]\d{4} ", line)]
        raise KubectlError("\n".join(said) or f"kubectl {words[0]} failed with exit code {done.returncode}")
    return done.stdout


def _kubectl(namespace: str) -> list[str]:
    return ["kubectl", "--namespace", namespace]


_COMMANDS: dict[str, Callable[[str, str], int]] = {"follow": follow, "state": state, "stop": stop}


def main(command: str, namespace: str, name: str) -> int:
    """Exit code: 1 where kubectl failed; it says how."""
    try:
        return _COMMANDS[command](namespace, name)
    except KubectlError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
