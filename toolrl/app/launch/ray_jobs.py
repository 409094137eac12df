"""`python -m toolrl.app.launch.ray_jobs submit|follow|state|stop|stop-all ADDRESS …`: jobs of a Ray cluster, by its job server.

`follow` prints what the job prints and ends with its exit code. Of a job that was told to stop Ray keeps none: the job's shell
says the run's with its last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

SAID = "toolrl train ended with exit code "
# A shell with a trap waits for what it runs, which Ray sends the same signal. The run that was launched before goes on.
ENTRYPOINT = f"trap : TERM; toolrl train RUN_FILE --or-resume; code=$?; echo '{SAID}'$code; exit $code"
JOIN_DEADLINE_S = 600.0
STOP_DEADLINE_S = 600.0
LOOK_EVERY_S = 0.5


def submit(address: str, name: str, run_file: str, nodes: str, environment: str) -> int:
    """Prints the job's id. Waits for `nodes` nodes first: `ray up` returns when only the head is there.
    `environment` is a JSON object of the run's variables."""
    if not _nodes_are_there(address, int(nodes)):
        return 1
    folder = os.getcwd()
    print(
        _client(address).submit_job(
            entrypoint=ENTRYPOINT.replace("RUN_FILE", run_file),
            submission_id=f"{name}-{time.strftime('%Y%m%d-%H%M%S')}",
            runtime_env={
                "working_dir": folder,
                "excludes": ["ray-token"],
                # Ray kills a job that it has told to stop after so long; 3 s by itself, too short for a checkpoint.
                "env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": f"{STOP_DEADLINE_S:.0f}"} | json.loads(environment),
            },
            metadata={"toolrl_run": name},
        )
    )
    return 0


def follow(address: str, job: str) -> int:
    """The job's exit code; 1 where it never had one."""
    client = _client(address)

    async def print_lines() -> None:
        async for lines in client.tail_job_logs(job):
            print(lines, end="", flush=True)

    asyncio.run(print_lines())
    while not client.get_job_status(job).is_terminal():
        time.sleep(LOOK_EVERY_S)
    info = client.get_job_info(job)
    if info.driver_exit_code is not None:
        return int(info.driver_exit_code)
    last = client.get_job_logs(job).rstrip().rpartition("\n")[2]
    if last.startswith(SAID):
        return int(last.removeprefix(SAID))
    if info.message:
        print(info.message, file=sys.stderr)
    return 1


def state(address: str, job: str) -> int:
    info = _client(address).get_job_info(job)
    print(info.status.value, info.message or "")
    return 0


def stop(address: str, job: str) -> int:
    """Ray sends TERM to the run, which writes a checkpoint; returns when it has ended."""
    client = _client(address)
    client.stop_job(job)
    ends = time.monotonic() + STOP_DEADLINE_S
    while not client.get_job_status(job).is_terminal():
        if time.monotonic() > ends:
            print(f"job {job} has not ended in {STOP_DEADLINE_S:g} s", file=sys.stderr)
            return 1
        time.sleep(LOOK_EVERY_S)
    return 0


def stop_all(address: str) -> int:
    """As `stop`, every job that has not ended: before the head goes."""
    running = [job for job in _client(address).list_jobs() if job.submission_id and not job.status.is_terminal()]
    return max((stop(address, job.submission_id) for job in running), default=0)


def _nodes_are_there(address: str, wanted: int) -> bool:
    if wanted == 1:
        return True
    from ray.util.state import list_nodes

    ends = time.monotonic() + JOIN_DEADLINE_S
    while True:
        there = len(list_nodes(address=address, filters=[("state", "=", "ALIVE")]))
        if there >= wanted:
            return True
        if time.monotonic() > ends:
            print(f"only {there} of {wanted} nodes came in {JOIN_DEADLINE_S:g} s", file=sys.stderr)
            return False
        print(f"{there} of {wanted} nodes are there", file=sys.stderr)
        time.sleep(5 * LOOK_EVERY_S)


def _client(address: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(address)


_COMMANDS: dict[str, Callable[..., int]] = {
    "submit": submit,
    "follow": follow,
    "state": state,
    "stop": stop,
    "stop-all": stop_all,
}

if __name__ == "__main__":
    sys.exit(_COMMANDS[sys.argv[1]](*sys.argv[2:]))
