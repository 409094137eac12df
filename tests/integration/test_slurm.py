"""A run under a real Slurm: submitted as a heterogeneous job, followed, asked about, and stopped in order.

Being put back, preempted and out of time take more starts of an engine: `make slurm-check`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.slurm_cluster import slurm_cluster
from tests.integration.slurm_run import SlurmRun
from tests.requirements import need

need("ray", "vllm", "deepspeed", "netns", "slurm")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]


def test_a_job_of_slurm_trains_and_stops_with_a_checkpoint_and_leaves_nothing(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path, {"head": 2, "rollout": 1}) as cluster:
        run = SlurmRun(cluster, {"head": {"cpus": 2, "resources": {"group-learner": 1}}, "rollout": {"cpus": 1}})
        run.launch()
        run.wait_for_step(2)
        status = run.toolrl("status", run.name)
        assert status.count("RUNNING") == 2 and f"of {run.STEPS}" in status, status

        run.toolrl("stop", run.name)
        assert run.exit_code() == 0
        assert run.checkpoint() == run.step()
        assert f"`toolrl train {run.name} --resume` goes on from there" in run.toolrl("logs", run.name)
        assert f"toolrl launch {run.name} --resume --target slurm" in run.said()
        assert "COMPLETED" in run.toolrl("status", run.name)
        run.assert_nothing_is_left()
