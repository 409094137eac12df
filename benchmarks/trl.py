"""A whole training run beside TRL's GRPOTrainer: the same start, task, tool and batches; trajectories/s, reward by time.

Both start from one checkpoint that `toolrl cold-start` makes with TRL's own Qwen3 training template and the tool's schema as
TRL renders it, and learn sums of two 2-digit numbers with a tool of which every fifth call fails: 16 groups of 8, 4 optimiser
steps a batch, rate 1e-4, reward 1 for the right answer. One after the other, each with the whole machine.

ours: `toolrl train` with quickstart-cpu's objective: Ray, vLLM, the sandbox, the replay buffer, rollouts one batch ahead.
TRL: its own loop and objective in float32, transformers' generation, no gradient checkpointing, and a tool that is a function
in its process (`sides/trl_run.py`). Its turns are as short as ours; a call that breaks the format ends an episode there.

Start-up (imports, Ray, engine, model) is not counted on either side. Speed is of all batches after the first; a reward is a
mean over five batches. `--quick` makes three batches from a start that has learnt next to nothing, which shows that both sides
work and no more. The start is kept, and used again while its settings are the same.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.sides.commands import finish, toolrl
from benchmarks.sides.process import ROOT
from benchmarks.sides.trl_environment import trl_python

BATCHES, QUICK_BATCHES = 60, 3
START_STEPS, QUICK_START_STEPS = 450, 10
GROUPS, GROUP, UPDATES, RATE = 16, 8, 4, 1e-4
FAILURES = 0.2
TURN_TOKENS, RESPONSE_TOKENS, CALLS = 48, 320, 4
GOAL, MEAN_OF = 0.7, 5
SEED = 0


class Point(NamedTuple):
    """A batch that was trained: seconds since the first rollout began, and its mean reward."""

    time_s: float
    reward: float


def run(quick: bool = False, trl: str | None = None, folder: Path = Path("bench-results/trl")) -> dict[str, Any]:
    """`rows`: one a side; `curves`: side -> [seconds, mean reward] by batch. What the runs leave lies in `folder`."""
    python = trl_python(trl)
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    template = folder / "qwen3_training.jinja"
    template.write_text(trl_template(python))
    batches = QUICK_BATCHES if quick else BATCHES
    before = os.getloadavg()[0]
    model, start_s = common_start(folder, template, QUICK_START_STEPS if quick else START_STEPS)
    shared = shared_with_trl(template, model, batches)
    curves = {
        "ours": run_ours(folder, template, model, batches),
        "TRL": run_trl(folder, model, batches, shared, python),
    }
    return {
        "load before": before,
        "load after": os.getloadavg()[0],
        "seconds of the cold start": start_s,
        "tokens of a prompt": len(shared["first_prompt_ids"]),
        "rows": [row(side, points, curves["TRL"]) for side, points in curves.items()],
        "curves": {side: [list(point) for point in points] for side, points in curves.items()},
    }


def settings(name: str, model: Path | str, template: Path, *, start_steps: int, batches: int) -> dict[str, Any]:
    """What differs from the quickstart, on the way to the common start and in our run."""
    sums = {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    return {
        "base": "quickstart-cpu",
        "name": name,
        "seed": SEED,
        "model": {"path": str(model), "chat_template": str(template)},
        "tasks": {"families": [{"name": "chain_sum", "options": sums}], "held_out_tasks": 0},
        "tools": [{"name": "benchmarks.sides.trl_tool:python", "timeout_s": 5.0, "failure_rate": FAILURES}],
        "rewards": {
            "components": [{"name": "outcome", "options": {"partial_credit": False}}, {"name": "code_similarity"}]
        },
        "rollout": {
            "max_turns": CALLS + 1,
            "max_calls": CALLS,
            "max_turn_tokens": TURN_TOKENS,
            "max_response_tokens": RESPONSE_TOKENS,
            "max_context_tokens": 1024,
        },
        "learner": {
            "learning_rate": RATE,
            "updates_per_batch": UPDATES,
            "schedule": "constant",
            # The cold start has the machine to itself.
            "cpu_threads": len(os.sched_getaffinity(0)) if start_steps else 1,
        },
        "cold_start": {"steps": start_steps, "traces": 4096},
        "loop": {
            "steps": batches,
            "groups_per_step": GROUPS,
            "group_size": GROUP,
            "checkpoint_every_steps": batches,
        },
    }


def common_start(folder: Path, template: Path, steps: int) -> tuple[Path, float]:
    """The checkpoint that both sides start from, and the seconds that making it took (0: it was there)."""
    wanted = settings("start", "tiny:qwen3", template, start_steps=steps, batches=1)
    kept = folder / f"start-{steps}"
    model, known = kept / "start" / "cold-start" / "model", kept / "settings.json"
    if (model / "config.json").is_file() and known.is_file() and json.loads(known.read_text()) == wanted:
        return model, 0.0
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    started = time.monotonic()
    toolrl("cold-start", wanted, kept)
    known.write_text(json.dumps(wanted))
    return model, time.monotonic() - started


def run_ours(folder: Path, template: Path, model: Path, batches: int) -> list[Point]:
    """`toolrl train`, and what its metrics say."""
    kept = folder / "ours"
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir()
    toolrl("train", settings("run", model, template, start_steps=0, batches=batches), kept)
    lines = (kept / "run" / "metrics.jsonl").read_text().splitlines()
    return points_of([json.loads(line) for line in lines])


def points_of(metrics: Sequence[dict[str, float]]) -> list[Point]:
    """The clock of a run's metrics starts with the process; the first step's own times say when its rollouts began."""
    parts = ("time/rollout_s", "time/learn_s", "time/publish_s")
    began = metrics[0]["time_s"] - sum(metrics[0][part] for part in parts)
    return [Point(each["time_s"] - began, each["reward/component/outcome"]) for each in metrics]


def run_trl(folder: Path, model: Path, batches: int, shared: dict[str, Any], python: str) -> list[Point]:
    """TRL's run on the tasks that ours trained on, in the same order."""
    target = folder / "trl-curve.json"
    request = folder / "trl-request.json"
    request.write_text(
        json.dumps(
            shared
            | {
                "model": str(model),
                "target": str(target),
                "batches": batches,
                "groups": GROUPS,
                "group": GROUP,
                "updates": UPDATES,
                "rate": RATE,
                "failures": FAILURES,
                "turn_tokens": TURN_TOKENS,
                "response_tokens": RESPONSE_TOKENS,
                "calls": CALLS,
                "seed": SEED,
                "threads": len(os.sched_getaffinity(0)),
            }
        )
    )
    line = [python, "-P", "-m", "benchmarks.sides.trl_run", str(request)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment.pop("OMP_NUM_THREADS", None)  # it says itself how many
    finish(line, folder / "trl.log", environment)
    return [Point(*point) for point in json.loads(target.read_text())]


def shared_with_trl(template: Path, model: Path, batches: int) -> dict[str, Any]:
    """Tasks, and the first prompt's ids, which TRL's side must get from its own rendering."""
    from omegaconf import OmegaConf

    from actors.worker_setup import Setup
    from toolrl import presets

    file = template.with_name("shared.yaml")
    file.write_text(OmegaConf.to_yaml(settings("run", model, template, start_steps=0, batches=batches)))
    setup = Setup.of(presets.load(str(file)), model)
    tasks = [setup.tasks.task(index) for index in range(batches * GROUPS)]
    return {
        "tasks": [{"messages": task.messages, "answer": str(task.ground_truth)} for task in tasks],
        "first_prompt_ids": setup.chat.prompt_ids(tasks[0].messages),
    }


def trl_template(python: str) -> str:
    """The Qwen3 training template of the TRL in that environment."""
    ask = "import importlib.util as u; print(u.find_spec('trl').submodule_search_locations[0])"
    done = subprocess.run([python, "-P", "-c", ask], capture_output=True, text=True, check=True)
    return (Path(done.stdout.strip()) / "chat_templates" / "qwen3_training.jinja").read_text(encoding="utf-8")


def row(side: str, points: Sequence[Point], peer: Sequence[Point]) -> dict[str, Any]:
    """A side's line of the table; `peer` are TRL's points."""
    means = smoothed([point.reward for point in points])
    return {
        "side": side,
        "trajectories/s": trajectories_per_s(points),
        "times TRL": trajectories_per_s(points) / trajectories_per_s(peer),
        "s a batch": statistics.median(b.time_s - a.time_s for a, b in itertools.pairwise(points)),
        "first reward": points[0].reward,
        f"s to {GOAL}": time_to(points, GOAL),
        "highest reward": max(means),
        "last reward": means[-1],
        "s in all": points[-1].time_s,
    }


def trajectories_per_s(points: Sequence[Point]) -> float:
    """Of all batches after the first, which pays for warming up."""
    return (len(points) - 1) * GROUPS * GROUP / (points[-1].time_s - points[0].time_s)


def smoothed(rewards: Sequence[float]) -> list[float]:
    """Means over the last five batches, or as many as there were by then."""
    return [statistics.fmean(rewards[max(0, end - MEAN_OF) : end]) for end in range(1, len(rewards) + 1)]


def time_to(points: Sequence[Point], goal: float) -> float | None:
    """Seconds until five batches in a row have this mean reward; None: never."""
    means = smoothed([point.reward for point in points])
    reached = (point.time_s for point, mean in list(zip(points, means, strict=True))[MEAN_OF - 1 :] if mean >= goal)
    return next(reached, None)
