"""`toolrl eval`: plays held-out tasks with a run's model or any other; accuracy, pass@k, tool use and format by family.

Nothing is trained and no buffer is needed: rollout workers play the tasks and hand the episodes over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolrl import presets, tasks, toolcalls, trajectory_parquet
from toolrl.app import runs
from toolrl.app.evaluation_table import evaluation_table
from toolrl.app.model_folder import prepare_model
from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory

# Plays these tasks, each `samples` times: (tasks, samples, temperature) -> trajectories.
Play = Callable[[list[Task], int, float], Awaitable[list[Trajectory]]]


@dataclass(frozen=True)
class Subject:
    """What is evaluated: a model folder, under the settings of a run or a preset."""

    config: RunConfig
    model_dir: Path
    report_dir: Path  # where table and trajectories are kept


def subject(run_or_model: str, overrides: list[str], *, settings: str | None = None, runs_dir: str = "runs") -> Subject:
    """Finds what to evaluate: a run (its final model, else the one it started from) or a model under given settings.

    Args:
        run_or_model: a run's name or folder; or, with `settings`, a Hugging Face folder, hub name or `tiny:qwen3`.
        settings: preset or YAML file that says the tasks, tools and limits for a model that belongs to no run.

    Raises:
        UserError: no such run, model or setting.
    """
    if settings is not None:
        config = presets.load(settings, [f"model.path={run_or_model}", *overrides])
        config = replace(
            config, name="eval-" + re.sub(r"[^\w.-]+", "-", Path(run_or_model).name or "model"), runs_dir=runs_dir
        )
        config = runs.with_free_name(config)
        model_dir = prepare_model(config)
        return Subject(config, model_dir, model_dir.parent)
    try:
        folder = runs.find(run_or_model, runs_dir)
    except UserError as error:
        raise UserError(
            f"{error}; to evaluate a model that is not a run, say under which settings: --settings PRESET"
        ) from None
    config = presets.load(str(folder / runs.CONFIG_FILE), overrides)
    config = replace(config, name=folder.resolve().name, runs_dir=str(folder.resolve().parent))
    trained = folder / "final"
    return Subject(config, trained if (trained / "config.json").is_file() else folder / "model", folder / "evaluation")


async def evaluation(
    config: RunConfig, play: Play, *, samples: int, temperature: float
) -> tuple[dict[str, Any], list[Trajectory]]:
    """The table of `evaluation_table` over all held-out tasks, and the episodes behind it."""
    held_out = tasks.build(config.tasks, config.seed).held_out()
    if not held_out:
        raise UserError("there are no held-out tasks to play: set tasks.held_out_tasks above 0")
    episodes = await play(held_out, samples, temperature)
    weight = config.rewards.weights.get("outcome", 1.0)
    vllm = config.rollout.parser.startswith("vllm:")  # vLLM's parsers live in the workers
    format_state = None if vllm else toolcalls.get(config.rollout.parser).format_state
    return evaluation_table(episodes, outcome_weight=weight, format_state=format_state), episodes


def evaluate(chosen: Subject, *, samples: int | None = None, temperature: float | None = None) -> dict[str, Any]:
    """Starts the rollout workers, plays, stops them. Table and episodes are kept in `chosen.report_dir`.

    Args:
        samples: k of avg@k and pass@k; default: `loop.eval_samples`.
        temperature: default: the run's own.
    """
    config = chosen.config
    started = time.monotonic()
    table, episodes = asyncio.run(
        _evaluate(
            chosen,
            samples or config.loop.eval_samples,
            config.rollout.temperature if temperature is None else temperature,
        )
    )
    table["seconds"] = time.monotonic() - started
    chosen.report_dir.mkdir(parents=True, exist_ok=True)
    (chosen.report_dir / "table.json").write_text(json.dumps(table, indent=1))
    trajectory_parquet.write(chosen.report_dir / "episodes.parquet", episodes)
    return table


async def _evaluate(chosen: Subject, samples: int, temperature: float) -> tuple[dict[str, Any], list[Trajectory]]:
    import ray

    from actors.worker_pool import WorkerPool
    from toolrl import placement
    from toolrl.app.parts import sandbox_hosts, start_ray

    start_ray(chosen.config)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(ray.shutdown)
        on_gpu = placement.resolve_device(chosen.config, ray.cluster_resources()) == "cuda"
        await stack.enter_async_context(sandbox_hosts(chosen.config))
        pool = await WorkerPool.start(chosen.config, str(chosen.model_dir), None, on_gpu=on_gpu)
        stack.push_async_callback(pool.stop)

        async def play(held_out: list[Task], k: int, at: float) -> list[Trajectory]:
            return await pool.evaluate(len(held_out), k, at)

        return await evaluation(chosen.config, play, samples=samples, temperature=temperature)
