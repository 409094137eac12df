"""`slurm`: one heterogeneous job, a component a group, Ray over its nodes."""

from __future__ import annotations

import sys

from toolrl.app.launch.target import RUN_FILE, Rendered, filled, run_file, targets, templates
from toolrl.config import RunConfig

FILE = "run.sbatch"


@targets.register("slurm")
def slurm(config: RunConfig) -> Rendered:
    """The folder that is submitted from must lie on a file system that all nodes share, as runs_dir does."""
    node = (templates().parent / "docker" / "node.sh").read_text()
    job = [sys.executable, "-m", "toolrl.app.launch.slurm_jobs"]
    return Rendered(
        files={
            FILE: filled("slurm.sbatch.j2", config, time_limit=time_limit(config.cluster.time_limit)),
            "node.sh": node,
            RUN_FILE: run_file(config),
        },
        submit=["sbatch", "--parsable", FILE],
        follow=[*job, "follow", "{id}", f"{config.name}-{{id}}.log"],
        state=[*job, "state", "{id}"],
        stop=[*job, "stop", "{id}"],
    )


def time_limit(said: str) -> str:
    """As Slurm writes it, to whom a plain number means minutes and to us seconds."""
    if not said.isdigit():
        return said
    minutes, seconds = divmod(int(said), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
