"""Metrics to Weights & Biases, beside the run's own files (`pip install toolrl[wandb]`, setting `wandb_project`).

wandb's own environment variables hold: WANDB_MODE=offline keeps everything in the run's folder, WANDB_API_KEY logs in.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from toolrl.errors import UserError


class WandbLog:
    """One run's metrics at wandb; a resumed run goes on under the same id."""

    def __init__(self, project: str, run_dir: Path, settings: Mapping[str, Any]) -> None:
        """Raises UserError when wandb is not installed."""
        if importlib.util.find_spec("wandb") is None:
            raise UserError(
                f"wandb_project={project!r} needs wandb: pip install 'toolrl[wandb]', or leave wandb_project empty"
            )
        import wandb

        self._run = wandb.init(
            project=project, name=run_dir.name, id=run_dir.name, resume="allow", dir=str(run_dir), config=dict(settings)
        )
        # Steps are an axis of ours: a resumed run repeats those after its checkpoint, which wandb's own step cannot.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, version: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, "version": version, **metrics})

    def close(self) -> None:
        self._run.finish()
