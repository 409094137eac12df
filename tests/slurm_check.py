"""What a run under a real Slurm lives through: it is put back, preempted, out of time, launched again.

`make slurm-check`; not part of the tests: four starts of everything, twenty minutes on two cores.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.integration.slurm_cluster import slurm_cluster
from tests.integration.slurm_run import SlurmRun
from tests.requirements import need

need("ray", "vllm", "deepspeed", "netns", "slurm", "docker")

from actors.replay import read_ledger
from toolrl.monitors.metrics_log import read_metrics

GROUPS = {"head": {"cpus": 2, "resources": {"group-learner": 1}}, "rollout": {"cpus": 1}, "sandbox": {"cpus": 1}}
PATIENCE_S = 1200.0

pytestmark = pytest.mark.timeout(3600)


def test_a_run_that_is_put_back_goes_on_and_one_that_is_preempted_ends_in_order(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path, {"head": 2, "rollout": 1, "sandbox": 1}) as cluster:
        run = SlurmRun(cluster, GROUPS, {"placement": {"sandbox": "hosts"}})
        run.launch()
        run.wait_for_step(6, PATIENCE_S)

        # Killed, and started again under its number.
        kept, job = run.checkpoint(), run.job()
        cluster.run("scontrol", "requeue", job)
        run.wait_until("a resumption", lambda: "resumed after step" in run.log(), PATIENCE_S)
        assert int(run.log().rpartition("resumed after step ")[2].partition(":")[0]) >= kept
        assert run.job() == job

        # A more urgent job wants the nodes.
        run.wait_for_step(run.step() + 3, PATIENCE_S)
        wide = ["--nodes=3", "--exclusive", "--mem=1G", "--output=/dev/null"]
        cluster.run("sbatch", "--wait", "--partition=urgent", *wide, "--wrap=true", timeout_s=PATIENCE_S)
        assert run.exit_code() == 0
        ended_well(run)


def test_a_run_whose_time_is_up_ends_in_order_and_is_launched_again_to_its_end(tmp_path: Path) -> None:
    with slurm_cluster(tmp_path, {"head": 2, "rollout": 1, "sandbox": 1}) as cluster:
        run = SlurmRun(cluster, GROUPS, {"placement": {"sandbox": "hosts"}})
        run.launch("cluster.time_limit=0:12:00")  # told five to six minutes before
        assert run.exit_code(PATIENCE_S) == 0
        ended_well(run)

        steps = run.step() + 3
        run.launch("--resume", f"loop.steps={steps}", "cluster.time_limit=1:00:00")
        assert run.exit_code(PATIENCE_S) == 0
        assert (run.folder / "finished.json").is_file()
        assert [row["step"] for row in read_metrics(run.folder)] == list(range(1, steps + 1))
        ledger = read_ledger(run.folder / "ledger.sqlite")
        assert ledger.balances
        assert ledger.trained == steps * 2 * 4
        run.assert_nothing_is_left()


def ended_well(run: SlurmRun) -> None:
    """With a checkpoint of its last step, how to go on, and nothing left behind."""
    assert run.checkpoint() == run.step()
    assert f"stopped after step {run.step()}; `toolrl train {run.name} --resume` goes on" in run.log()
    run.assert_nothing_is_left()
    ours = ["docker", "ps", "--all", "--quiet", f"--filter=label=toolrl.sandbox.run={run.name}"]
    assert not subprocess.run(ours, capture_output=True, text=True, check=True).stdout
