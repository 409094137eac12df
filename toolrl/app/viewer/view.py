"""What a run shows and writes down while it goes: live screen or log lines, metrics, sampled trajectories, last screen.

The files are the same whatever is shown, and nothing here has an effect on training.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.live import Live

from toolrl import trajectory_parquet
from toolrl.app.run_folder import RunFolder
from toolrl.app.viewer.curves import EVALUATIONS, plot_curves, read_evaluations
from toolrl.app.viewer.ood import ood_view
from toolrl.app.viewer.screen import Seen, screen
from toolrl.app.viewer.step_line import POLICY_TOKENS_PER_S, step_line
from toolrl.app.viewer.summary import summary
from toolrl.config import RunConfig
from toolrl.ledger import Ledger
from toolrl.monitors.metrics_log import MetricsLog, read_metrics
from toolrl.monitors.wandb_log import WandbLog
from toolrl.trajectory import Trajectory

_RECENT = 10  # steps that the time left is estimated from


class View:
    """A context manager around a run. Live on a terminal; one line a step in a pipe or with `quiet`."""

    def __init__(self, config: RunConfig, folder: RunFolder) -> None:
        self.config = config
        self.folder = folder
        self.console = Console(highlight=False) if sys.stdout.isatty() else Console(highlight=False, width=120)
        self.seen = Seen(config.name, config.loop.steps)
        earlier = read_metrics(folder.path)
        self._before_s = earlier[-1]["time_s"] if earlier else 0.0  # of the run that this one continues
        self._started = self._last_step = time.monotonic()
        self._step_times: list[float] = []
        self._log = MetricsLog(folder.path)
        self._said = folder.log.open("a", encoding="utf-8", buffering=1)  # what `toolrl logs` shows
        self._wandb = (
            WandbLog(config.wandb_project, folder.path, dataclasses.asdict(config)) if config.wandb_project else None
        )
        self._live: Live | None = None
        if self.console.is_terminal and not config.quiet:
            # Redrawn by its own thread, so that clocks run while a step takes long; prints and logs appear above it.
            self._live = Live(get_renderable=lambda: screen(self.seen), console=self.console, refresh_per_second=4)

    def __enter__(self) -> View:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_live()
        self._log.close()
        self._said.close()
        if self._wandb is not None:
            self._wandb.close()

    def stage(self, text: str) -> None:
        """What is being done now."""
        self.seen.stage, self.seen.stage_since = text, time.monotonic()
        self._say(text)

    def note(self, text: str) -> None:
        """Something that happened: a checkpoint, a worker replaced, an alarm."""
        self.seen.notes.append(text)
        self._say(text)

    def step(self, step: int, version: int, metrics: Mapping[str, float], trajectories: Sequence[Trajectory]) -> None:
        """A step that was trained: its metrics go to the files and the screen, some trajectories to `trajectories/`."""
        now = time.monotonic()
        step_s, self._last_step = now - self._last_step, now
        if not self._step_times and not self.seen.latest:  # the first step's clock ran since before the start-up
            step_s = sum(metrics.get(f"time/{part}_s", 0.0) for part in ("rollout", "learn", "publish")) or step_s
        self._step_times = [*self._step_times, step_s][-_RECENT:]
        complete = {**metrics, POLICY_TOKENS_PER_S: metrics.get("tokens/policy", 0.0) / max(step_s, 1e-9)}
        self._log.write(step, version, self._before_s + now - self._started, complete)
        if self._wandb is not None:
            self._wandb.write(step, version, complete)
        shown = chosen(trajectories, self.config.loop.shown_trajectories_per_step)
        if shown:
            self._keep(shown, self.folder.trajectories_of(step))
        left_s = (self.config.loop.steps - step) * sum(self._step_times) / len(self._step_times)
        self.seen.add(step, complete, left_s)
        self.seen.stage = ""
        self._say(step_line(step, self.config.loop.steps, complete, left_s))

    def evaluated(self, step: int, table: Mapping[str, Any]) -> None:
        """An evaluation on held-out tasks (`evaluation_table`), kept in evaluations.jsonl."""
        with (self.folder.path / EVALUATIONS).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **table}) + "\n")
        measured = table["all"]
        self.note(
            f"held-out tasks at step {step}: accuracy {measured['accuracy']:.3f}, "
            f"call rate {measured['tool_call_rate']:.2f} ({measured['tasks']} tasks)"
        )

    def finish(self, evaluations: Sequence[Mapping[str, Any]], ledger: Ledger | None) -> Path | None:
        """The last screen, and the curves. Returns the PNG's path.

        Args:
            evaluations: of this process; those on disk reach back to before a resumed run's first start.
        """
        self._stop_live()
        png = plot_curves(self.folder.path)
        recorded = read_evaluations(self.folder.path) or evaluations
        self.console.print(summary(_short(self.folder.path), recorded, ledger))
        if recorded and (compared := recorded[-1].get("ood")):
            self.console.print(ood_view(compared))
        return png

    def _keep(self, shown: list[Trajectory], path: Path) -> None:
        """Whole or not at all; a text that Parquet cannot hold costs these trajectories, not the run."""
        partial = path.with_suffix(".partial")
        try:
            trajectory_parquet.write(partial, shown)
        except ValueError as error:
            self.note(f"{path.name} not written: {error}")
            partial.unlink(missing_ok=True)
        else:
            partial.replace(path)

    def _stop_live(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _say(self, text: str) -> None:
        self._said.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}  {text}\n")
        if self._live is None:
            print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


def chosen(trajectories: Sequence[Trajectory], count: int) -> list[Trajectory]:
    """`count` of them from the best reward to the worst, evenly spaced: what goes well and what does not."""
    ranked = sorted(trajectories, key=lambda t: (-t.reward, t.id))
    if count >= len(ranked):
        return ranked
    if count <= 1:
        return ranked[:count]
    return [ranked[round(i * (len(ranked) - 1) / (count - 1))] for i in range(count)]


def _short(path: Path) -> Path:
    """Relative to where the user is, if it lies there."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # the folder that a job was started in may be gone by its end
        return path
    return path.relative_to(here) if path.is_relative_to(here) else path
