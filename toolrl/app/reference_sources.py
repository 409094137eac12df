"""Where the run's references come from, and where they are while the run is not: its folder and its checkpoints.

`References` live in a Ray actor, because rollout workers ask them and the loop fills them. What was given is read again
from where it came whenever a run starts; the run's own are part of its checkpoints.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from toolrl import trajectory_parquet
from toolrl.app.cold_start import TRACES, Watched, generate_traces, keep_traces, read_traces
from toolrl.app.cold_start_solvers import NoSolver, programs
from toolrl.app.run_folder import RunFolder
from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.guards.presets import rules
from toolrl.supervision import References, is_reference
from toolrl.tasks import TaskSource
from toolrl.trajectory import Trajectory

_OWN = "references.msgpack"  # in a checkpoint
_SOLVED = "references"  # in the run's folder: the tasks that were solved for it


def check(config: RunConfig, tasks: TaskSource) -> None:
    """Whether the tasks that are to be solved can be.

    Raises:
        UserError: names the first that cannot.
    """
    count = config.supervision.references.solved_tasks
    for task in map(tasks.task, range(count)):
        try:
            programs(task.family, task.question, 1 if config.cold_start.dense else config.cold_start.min_calls)
        except NoSolver as error:
            raise UserError(
                f"supervision.references.solved_tasks={count}: task {task.id} cannot be solved by the cold start's programs; "
                f"give references in a file (supervision.references.path) and set 0. {error}"
            ) from error


def start(config: RunConfig) -> Any:
    """The Ray handle of the run's `References`, still empty; None where nothing in the run asks for any."""
    s = config.supervision
    wanted = s.off_policy.per_group or s.erroneous.enabled or s.interleaved.every_steps
    if not wanted and all(rule.action.name != "sft_burst" for rule in rules(config)):
        return None
    import ray

    return ray.remote(References).options(num_cpus=0).remote(s.references.max_tasks)


async def fill(references: Any, config: RunConfig, folder: RunFolder, view: Watched) -> None:
    """Gives what `supervision.references` names, and tells how many were taken in; nothing where there is no one to ask
    for them.

    Raises:
        UserError: a file without a trajectory to learn from, or of another model's tokens.
    """
    if references is None:
        return
    wanted, taken = config.supervision.references, {}
    if wanted.path is not None:
        given = await asyncio.to_thread(_of_file, Path(wanted.path), folder.model)
        taken["given"] = await references.give.remote(_fitting(given, config))
    if wanted.solved_tasks:
        view.stage(f"references: solving {wanted.solved_tasks} tasks")
        solved = await _solved_tasks(config, folder)
        taken["solved"] = await references.give.remote(_fitting(solved, config))
    if wanted.cold_start and config.cold_start.steps:
        shown = await asyncio.to_thread(read_traces, Path(config.cold_start.traces_path or folder.cold_start / TRACES))
        taken["of the cold start"] = await references.give.remote(_fitting(shown, config))
    if taken:
        view.note(f"references: {', '.join(f'{count} {source}' for source, count in taken.items())}")


async def save_own(references: Any, checkpoint: Path) -> None:
    """The run's own references, into a checkpoint's folder."""
    if references is not None:
        (checkpoint / _OWN).write_bytes(await references.own_state.remote())


async def load_own(references: Any, checkpoint: Path) -> None:
    """What `save_own` wrote, in place of those there are; a checkpoint of a run that had no references then holds none."""
    if references is not None and (checkpoint / _OWN).is_file():
        await references.load_own_state.remote((checkpoint / _OWN).read_bytes())


def _fitting(trajectories: Iterable[Trajectory], config: RunConfig) -> list[Trajectory]:
    """Those that show how a task is done and are no longer than the learner's sequences may be."""
    s = config.supervision.references
    whole = config.rewards.weights.get("outcome", 1.0)
    longest = config.rollout.max_context_tokens
    return [
        each
        for each in trajectories
        if is_reference(each, full_outcome=whole, min_calls=s.min_calls) and len(each.token_ids) <= longest
    ]


def _of_file(path: Path, model_dir: Path) -> list[Trajectory]:
    from transformers import AutoTokenizer

    found = read_traces(path, "supervision.references.path")
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    for trajectory in found:
        for turn in trajectory.policy_turns:
            if tokenizer.decode(turn.token_ids, skip_special_tokens=False) != turn.text:
                raise UserError(
                    f"supervision.references.path: the tokens of trajectory {trajectory.id} in {path} are not those of the "
                    "run's model; use trajectories of a model with the same tokenizer"
                )
    return found


async def _solved_tasks(config: RunConfig, folder: RunFolder) -> list[Trajectory]:
    """The run's first tasks, played by the cold start's programs; kept in the run's folder for the next start."""
    count, kept = config.supervision.references.solved_tasks, folder.path / _SOLVED
    if (kept / TRACES).is_file():
        before = await asyncio.to_thread(lambda: list(trajectory_parquet.read(kept / TRACES)))
        if len(before) == count:
            return before
    dense = config.cold_start.dense  # these tasks are given, however many steps their answers take
    flawless = dataclasses.replace(
        config.cold_start,
        traces=count,
        dense=False,
        min_calls=1 if dense else config.cold_start.min_calls,
        max_calls=1 if dense else config.cold_start.max_calls,
        direct_guess_share=0.0,
        malformed_call_share=0.0,
        wrong_code_share=0.0,
        retry_share=0.0,
    )
    solved = await generate_traces(dataclasses.replace(config, cold_start=flawless), folder.model, first_task=0)
    await asyncio.to_thread(keep_traces, kept, solved)
    return solved
