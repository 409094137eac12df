"""`toolrl eval`: plays held-out tasks with a run's model or any other; accuracy, pass@k, tool use and format by family.

Nothing is trained and no buffer is needed: rollout workers play the tasks and hand the episodes over. Out of distribution
the same workers play on, under other settings (`toolrl.app.ood`).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from toolrl import presets, tasks, trajectory_parquet
from toolrl.app import ood, runs
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
    config: RunConfig, play: Play, *, samples: int, temperature: float, model_dir: str | Path = ""
) -> tuple[dict[str, Any], list[Trajectory]]:
    """The table of `evaluation_table` over all held-out tasks, and the episodes behind it.

    Args:
        model_dir: whose tokenizer one of vLLM's parsers reads.
    """
    held_out = tasks.build(config.tasks, config.seed).held_out()
    if not held_out:
        raise UserError("there are no held-out tasks to play: set tasks.held_out_tasks above 0")
    episodes = await play(held_out, samples, temperature)
    return await asyncio.to_thread(ood.table_of, episodes, config, model_dir), episodes


def evaluate(
    chosen: Subject, *, samples: int | None = None, temperature: float | None = None, out_of_distribution: bool = False
) -> dict[str, Any]:
    """Starts the rollout workers, plays, stops them. Table and episodes are kept in `chosen.report_dir`.

    Args:
        samples: k of avg@k and pass@k; default: `loop.eval_samples`.
        temperature: default: the run's own.
        out_of_distribution: also under the variants of `eval.ood`; the comparison is the table's key `ood`.
    """
    config = chosen.config
    started = time.monotonic()
    chosen.report_dir.mkdir(parents=True, exist_ok=True)
    table = asyncio.run(
        _evaluate(
            chosen,
            samples or config.loop.eval_samples,
            config.rollout.temperature if temperature is None else temperature,
            out_of_distribution,
        )
    )
    table["seconds"] = time.monotonic() - started
    (chosen.report_dir / "table.json").write_text(json.dumps(table, indent=1))
    return table


async def _evaluate(chosen: Subject, samples: int, temperature: float, out_of_distribution: bool) -> dict[str, Any]:
    import ray

    from actors.worker_pool import WorkerPool
    from toolrl import placement
    from toolrl.app.parts import sandbox_hosts
    from toolrl.app.ray_start import start_ray

    config, plan = chosen.config, None
    if out_of_distribution:
        plan = ood.OodPlan.of(config, chosen.model_dir, most_context_tokens=longest_context(chosen.model_dir))
    start_ray(config)
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(ray.shutdown)
        on_gpu = placement.resolve_device(config, ray.cluster_resources()) == "cuda"
        await stack.enter_async_context(sandbox_hosts(config))
        served = engines_for(config, plan)
        pool = await WorkerPool.start(served, str(chosen.model_dir), None, on_gpu=on_gpu)
        stack.push_async_callback(pool.stop)

        async def play_under(settings: RunConfig, count: int) -> list[Trajectory]:
            return await pool.evaluate(count, samples, temperature, settings)

        async def play(held_out: list[Task], k: int, at: float) -> list[Trajectory]:
            return await pool.evaluate(len(held_out), k, at, None if served.rollout == config.rollout else config)

        table, episodes = await evaluation(
            config, play, samples=samples, temperature=temperature, model_dir=chosen.model_dir
        )
        _keep(chosen.report_dir, None, episodes)
        if plan is not None:
            keep = functools.partial(_keep, chosen.report_dir)
            table["ood"] = await ood.compare(plan, table, play_under, chosen.model_dir, keep)
        return table


def engines_for(config: RunConfig, plan: ood.OodPlan | None) -> RunConfig:
    """Settings of the rollout workers: engines that serve the model whole, and every planned variant."""
    # Engines that could serve an adapter beside the model would be slower for nothing.
    config = replace(config, model=replace(config.model, lora=replace(config.model.lora, publish="merged")))
    if plan is None:
        return config
    return replace(config, rollout=replace(config.rollout, max_context_tokens=plan.context_tokens))


def longest_context(model_dir: Path) -> int | None:
    """Tokens of the longest context that the model knows positions for; None where its settings do not say."""
    known = json.loads((model_dir / "config.json").read_text())
    known = known.get("text_config", known)
    found: int | None = known.get("max_position_embeddings")
    return found


def _keep(report_dir: Path, variant: str | None, episodes: list[Trajectory]) -> None:
    name = "episodes" if variant is None else "episodes-" + re.sub(r"[^\w.-]+", "-", variant)
    trajectory_parquet.write(report_dir / f"{name}.parquet", episodes)
