"""The monitors of a stored run: what its trajectories say when they are read again, and what was written down for the rest.

- `recomputed`: read off the whole batch of the step, which the replay buffer keeps for the last steps (as many as it may have to
  train again), and `trajectories/` where `loop.shown_trajectories_per_step` covers the batch.
- `stored`: from metrics.jsonl: what needs the model, the account or the clock, and steps whose batch is gone. Rewards too: what
  the step itself adds to them (rewards of a whole group, KL) is not with the buffer's trajectories.
- `sample`: what is in no file, read off the few trajectories that `toolrl show` has. They run from the best reward to the
  worst, so shares are not those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from toolrl import presets, trajectory_parquet
from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.monitors import batch_metrics
from toolrl.monitors.known_metrics import known
from toolrl.monitors.metrics_log import read_metrics
from toolrl.trajectory import Trajectory

Origin = Literal["recomputed", "stored", "sample"]
_OF_THE_STEP = ("reward/", "signal/")  # the step adds to what they are made of


@dataclass
class MonitoredStep:
    """One step. `read` of `trained` trajectories were at hand."""

    step: int
    read: int = 0
    trained: int = 0
    values: dict[str, float] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    differing: list[str] = field(default_factory=list)  # recomputed, and written down otherwise at the step

    def as_dict(self) -> dict[str, Any]:
        """For JSON; a value that is no number is null."""
        metrics = {
            name: {"value": value if abs(value) < float("inf") else None, "from": self.origins[name]}
            for name, value in sorted(self.values.items())
        }
        return {"step": self.step, "trajectories": {"read": self.read, "trained": self.trained}, "metrics": metrics}


def monitor_run(folder: Path) -> list[MonitoredStep]:
    """Every step of the run in `folder`, in order.

    Raises:
        UserError: there is nothing to read yet.
    """
    config = presets.load(str(folder / "config.yaml"), [])
    written = {int(row["step"]): row for row in read_metrics(folder)}
    batches = _batches(folder, written)
    if not written and not batches:
        raise UserError(f"{folder} holds no step yet: nothing was trained")
    parser_state = _format_state(config, folder) if batches else None
    planned = config.loop.groups_per_step * config.loop.group_size
    found = []
    for step in sorted(written.keys() | batches.keys()):
        row = dict(written.get(step, {}))
        version, trajectories = batches.get(step, (int(row.get("version", 0)), []))
        trained = int(row.get("samples/trained", planned if step in written else len(trajectories)))
        made = MonitoredStep(step, len(trajectories), max(trained, len(trajectories)))
        read = _read(trajectories, version, config, parser_state) if trajectories else {}
        _merge(made, row, read, whole=len(trajectories) >= trained)
        found.append(made)
    return found


def _merge(made: MonitoredStep, row: dict[str, float], read: dict[str, float], *, whole: bool) -> None:
    for name in ("step", "version", "time_s"):
        row.pop(name, None)
    made.values, made.origins = dict(row), dict.fromkeys(row, "stored")
    written = {entry.pattern for name in row if (entry := known(name)) is not None}
    for name, value in read.items():
        entry = known(name)
        # Of a kind that the step did not write at all: else it is absent because the batch had none.
        is_new = entry is None or entry.pattern not in written
        if is_new or (whole and not name.startswith(_OF_THE_STEP)):
            made.values[name] = value
            made.origins[name] = "recomputed" if whole else "sample"
            if name in row and abs(row[name] - value) > 1e-9 * max(1.0, abs(value)):
                made.differing.append(name)


def _read(
    trajectories: Sequence[Trajectory], version: int, config: RunConfig, format_state: Callable[[str, str], str] | None
) -> dict[str, float]:
    return batch_metrics(
        trajectories,
        learner_version=version - 1,
        format_state=format_state,
        outcome_weight=config.rewards.weights.get("outcome", 1.0),
    )


def _batches(folder: Path, written: dict[int, dict[str, float]]) -> dict[int, tuple[int, list[Trajectory]]]:
    """Step -> (version of the weights after it, its trajectories as far as they are kept)."""
    from actors.replay import read_trained

    found = {}
    for path in (folder / "trajectories").glob("step-*.parquet"):
        step = int(path.stem.removeprefix("step-"))
        if step in written:
            found[step] = (int(written[step]["version"]), list(trajectory_parquet.read(path)))
    if (folder / "ledger.sqlite").is_file():
        for trained in read_trained(folder / "ledger.sqlite"):
            if len(trained.trajectories) > len(found.get(trained.step, (0, []))[1]):
                found[trained.step] = (trained.version, trained.trajectories)
    return found


def _format_state(config: RunConfig, folder: Path) -> Callable[[str, str], str]:
    from actors.worker_setup import parser_alone

    return parser_alone(config.rollout.parser, str(folder / "model")).format_state
