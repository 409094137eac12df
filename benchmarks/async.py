"""Training that does not wait for slow tools against training that does: the whole loop at staleness 0, 1, 2 and 4.

The same loop, model, tasks and tool each time: Ray, vLLM, learner, replay buffer; only `buffer.max_staleness` differs. A tiny
model knows one conversation by heart (a call of the calculator, then an answer), and the call's latency is drawn from a heavy
tail (mean 0.5 s, 99th percentile 5 s), the same for the same episode in every run. Rewards are equal, so advantages are 0 and
the policy stays as it is, while the learner does all of its work. The system prompt is long: an engine has it in its prefix
cache, the learner computes it for every group, so learning takes longer than generation, as with larger models.

Each run trains as many trajectories between two marks: the first when its pipeline is full (after staleness + 1 steps), the
second so many steps later. Where the slowest calls outlast the bound, the learner waits for them once in staleness + 1 steps, so
the steps between the marks are a multiple of that. The bound is that of a machine whose slower half never waits: a batch in
max(generation, learning) seconds. Both parts are measured in the synchronous run, where neither disturbs the other:
generation with tools that answer at once, learning as its steps take it, publication included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

MEAN_S, P99_S = 0.5, 5.0
SIZE = 4  # samples of a group
ROWS = 4096
SYSTEM = " ".join(["Use the calculator."] * 110) + " Answer in \\boxed{}."


class Scale(NamedTuple):
    """How much is measured.

    The bound can be reached where the batches in flight span the tail of the latencies: (staleness + 1) × learning must be
    longer than the slowest call of a batch, some 15 s of 960.
    """

    groups: int  # in a step
    steps: int  # measured in each run
    staleness: tuple[int, ...]

    @property
    def batch(self) -> int:
        return self.groups * SIZE


WHOLE, QUICK = Scale(240, 6, (0, 1, 2, 4)), Scale(20, 3, (0, 2))
CALLS = 1


class _Full(Exception):
    """Enough steps were measured."""


@dataclass
class Marks:
    """In place of a run's view: when each step ended, and what it said."""

    first: int  # steps until the pipeline is full
    steps: int
    engine: Engines | None = None
    ends: list[float] = field(default_factory=list)
    rows: list[Mapping[str, float]] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)
    machine_s: list[float] = field(default_factory=list)

    def step(self, step: int, version: int, metrics: Mapping[str, float], trajectories: Sequence[Any]) -> None:
        assert self.engine is not None
        self.ends.append(time.perf_counter())
        self.engine_s.append(self.engine.processor_s())
        self.machine_s.append(machine_processor_s())
        self.rows.append(metrics)
        if step >= self.first + self.steps:
            raise _Full

    def stage(self, text: str) -> None: ...

    def note(self, text: str) -> None:
        print(f"  {text}", flush=True)

    @property
    def wall_s(self) -> float:
        return self.ends[-1] - self.ends[self.first - 1]

    @property
    def measured(self) -> list[Mapping[str, float]]:
        return self.rows[self.first :]

    def total(self, name: str) -> float:
        return sum(row[name] for row in self.measured)

    def spent(self, seconds: Sequence[float]) -> float:
        """Of a counter that was read at every step: between the marks."""
        return seconds[-1] - seconds[self.first - 1]


def machine_processor_s() -> float:
    """Seconds in which any of the machine's processors worked, since it was started."""
    import psutil

    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system + times.irq + times.softirq)


class Engines:
    """The processes that vLLM started for the rollout workers."""

    def __init__(self, worker_pids: Sequence[int]) -> None:
        import psutil

        self._processes = [child for pid in worker_pids for child in psutil.Process(pid).children(recursive=True)]

    def processor_s(self) -> float:
        """Seconds of a processor that they have used."""
        times = [process.cpu_times() for process in self._processes if process.is_running()]
        return sum(each.user + each.system for each in times)


def run(quick: bool = False) -> dict[str, Any]:
    """`rows`: one for each staleness; and the parts that the bound is made of."""
    root = Path(__file__).resolve().parents[1]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(root), *filter(None, [os.environ.get("PYTHONPATH")])])
    torch.set_num_threads(1)
    before = os.getloadavg()[0]
    scale = QUICK if quick else WHOLE
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(folder)
        parts: dict[str, float] = {}
        runs = {staleness: asyncio.run(measure(folder, staleness, scale, parts)) for staleness in scale.staleness}
    batch, steps, sync = scale.batch, scale.steps, runs[0].wall_s
    learning = statistics.median(row["time/learn_s"] + row["time/publish_s"] for row in runs[0].measured)
    bound_s = max(parts["generation_s"], learning)
    return {
        "load before": before,
        "load after": os.getloadavg()[0],
        "trajectories a step": batch,
        "steps measured": steps,
        "generation alone, s a step": parts["generation_s"],
        "learning alone, s a step": learning,
        "bound, trajectories/s": batch / bound_s,
        "rows": [
            {
                "staleness": staleness,
                "trajectories/s": batch * steps / marks.wall_s,
                "times synchronous": sync / marks.wall_s,
                "share of the bound": bound_s * steps / marks.wall_s,
                "learner idle": marks.total("time/rollout_s") / marks.wall_s,
                "engine idle": 1 - marks.spent(marks.engine_s) / marks.wall_s,
                "processors busy": marks.spent(marks.machine_s) / marks.wall_s / (os.cpu_count() or 1),
                "processor ms a trajectory": 1000 * marks.spent(marks.machine_s) / (batch * steps),
                "mean latency, s": marks.total("tool/wall_s_mean") / steps,
                "mean staleness": marks.total("staleness/mean") / steps,
                "largest": max(row["staleness/max"] for row in marks.measured),
                "re-issued": marks.total("samples/reissued"),
            }
            for staleness, marks in runs.items()
        ],
    }


def prepare(folder: Path) -> None:
    """The model that knows the conversation, and the tasks that ask for it."""
    from transformers import AutoTokenizer

    from benchmarks.rollout import learn_by_heart
    from toolrl import toolcalls
    from toolrl.app.tiny_model import write_tiny_model
    from toolrl.config import ToolConfig
    from toolrl.conversation import ChatFormat
    from toolrl.tools import Toolbox

    model = folder / "start"
    write_tiny_model(model, 0)
    schemas = Toolbox.build([ToolConfig("calculator")], None, 0).schemas
    tokenizer = AutoTokenizer.from_pretrained(model)
    learn_by_heart(
        model, ChatFormat(tokenizer, tools=schemas, parser=toolcalls.get("hermes")), calls=CALLS, system=SYSTEM
    )
    rows = [{"prompt": f"Calculate {10 + i % 90} + {10 + 7 * i % 83}.", "answer": "46"} for i in range(ROWS)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def config_of(folder: Path, staleness: int, scale: Scale) -> Any:
    """The settings of one run."""
    from toolrl import presets

    latency = f"{{mean_s: {MEAN_S}, p99_s: {P99_S}}}"
    options = f"{{latency: {latency}, at_once: {folder / 'at-once'}}}"
    return presets.load(
        "quickstart-cpu",
        [
            f"name=staleness-{staleness}",
            f"runs_dir={folder / 'runs'}",
            f"model.path={folder / 'start'}",
            "tasks.kind=rows",
            "tasks.families=[]",
            f"tasks.path={folder / 'tasks.jsonl'}",
            "tasks.columns={ground_truth: answer}",
            f"tasks.system_prompt='{SYSTEM}'",
            f"tasks.held_out_tasks={scale.batch}",
            f"tools=[{{name: 'benchmarks.sides.slow_calculator:slow_calculator', timeout_s: 120, options: {options}}}]",
            f"rollout.concurrency={(staleness + 2) * scale.batch}",
            "rollout.temperature=0.3",
            "rollout.max_turns=8",
            "rollout.max_turn_tokens=64",
            "rollout.max_response_tokens=200",
            "rollout.max_context_tokens=1280",
            "cold_start.steps=0",
            f"buffer.max_staleness={staleness}",
            "engine.max_concurrent_requests=256",
            "learner.learning_rate=1e-6",
            f"loop.steps={staleness + 1 + scale.steps + staleness}",  # the pipeline stays full to the last measured step
            f"loop.groups_per_step={scale.groups}",
            f"loop.group_size={SIZE}",
            "loop.checkpoint_every_steps=0",
        ],
    )


async def measure(folder: Path, staleness: int, scale: Scale, parts: dict[str, float]) -> Marks:
    """One run of the loop; the synchronous one first measures generation by itself."""
    from toolrl.app import train as loop
    from toolrl.app.model_folder import prepare_model
    from toolrl.app.parts import start_parts
    from toolrl.app.run_folder import RunFolder

    config = config_of(folder, staleness, scale)
    run_folder = RunFolder.create(config)
    prepare_model(config)
    marks = Marks(first=staleness + 1, steps=scale.steps)
    async with start_parts(config, run_folder) as running:
        marks.engine = Engines([member.info["pid"] for member in running.workers.members.values()])
        if staleness == 0:
            parts["generation_s"] = await generation_s(running, folder / "at-once", config, scale)
        progress = await loop.begin(running, cast(Any, marks))
        with contextlib.suppress(_Full):
            await loop._until_trained(
                loop.train_policy(running, progress, cast(Any, marks)), loop.keep_rollouts_going(running, progress)
            )
    return marks


async def generation_s(running: Any, at_once: Path, config: Any, scale: Scale) -> float:
    """Seconds that the engine takes for one batch of episodes when tools answer at once and there is always enough to do."""
    await asyncio.to_thread(at_once.touch)
    await running.workers.evaluate(scale.batch, 1, config.rollout.temperature)  # warms the engine up
    began = time.perf_counter()
    await running.workers.evaluate(scale.batch, 2, config.rollout.temperature)
    taken = time.perf_counter() - began
    await asyncio.to_thread(at_once.unlink)
    return taken / 2


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
