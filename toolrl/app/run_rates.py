"""The rates of a plan as an earlier run met them: from its metrics and the trajectories that it kept.

A run that takes turns (`buffer.max_staleness=0`) measures best, for nothing disturbs its learner or its engines. On CPUs the
learner is measured in seconds of its own processor, which do not grow while others use the rest of the machine.
"""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from toolrl import presets, trajectory_parquet
from toolrl.app import runs
from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.planning import Layout, simulate
from toolrl.planning.rates import (
    EngineRates,
    EpisodeRates,
    LearnerRates,
    MachineRates,
    Rates,
    ToolRates,
    WeightRates,
)
from toolrl.trajectory import Trajectory

LEAST_STEPS = 3
CALIBRATIONS = 8
_Row = Mapping[str, float]


def run_rates(folder: Path) -> Rates:
    """Rates of a run with at least a few steps.

    Raises:
        UserError: it has too few steps, or was made before runs counted processor seconds.
    """
    config = presets.load(str(folder / runs.CONFIG_FILE))
    rows = _rows(folder)[config.buffer.max_staleness + 1 :]
    if len(rows) < LEAST_STEPS:
        raise UserError(f"run {folder.name} has {len(rows)} steps with a full pipeline; {LEAST_STEPS} are needed")
    if "worker/machine_processor_s" not in rows[0]:
        raise UserError(f"run {folder.name} counted no processor seconds; run it again with this version of toolrl")
    kept = [t for path in sorted(folder.glob("trajectories/*.parquet")) for t in trajectory_parquet.read(path)]
    episode = _episode(rows, kept)
    rates = Rates(
        engine=_engine(config, rows, kept, episode),
        episode=episode,
        tool=_tool(rows, kept),
        learner=_learner(config, rows),
        weights=WeightRates(_median(rows, "time/publish_s"), bytes_per_s=1.0, pause_s=0.0, turn_s=_turn_s(rows)),
        machine=_machine(config, rows),
        source=f"measured by run {folder.name}",
    )
    return calibrated(rates, Layout.of(config), _step_s(rows))


def calibrated(rates: Rates, layout: Layout, step_s: float) -> Rates:
    """The same with an engine as much faster or slower as makes the simulation of the run itself take as long as it took.

    What was measured of an engine holds how others disturbed it; the simulation adds that again.
    """
    for _ in range(CALIBRATIONS):
        times = step_s / simulate(rates, layout, steps=12).step_s
        engine = rates.engine
        faster = replace(engine, step_s=engine.step_s * times, step_s_each=engine.step_s_each * times)
        rates = replace(rates, engine=faster)
        if abs(times - 1) < 0.01:
            break
    return rates


def _rows(folder: Path) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"run {folder.name} has no metrics yet: {path} is written step by step")
    return [json.loads(line) for line in path.read_text().splitlines()]


def _median(rows: Sequence[_Row], name: str) -> float:
    return statistics.median(row[name] for row in rows)


def _mean(rows: Sequence[_Row], name: str) -> float:
    return statistics.fmean(row[name] for row in rows)


def _episode(rows: Sequence[_Row], kept: Sequence[Trajectory]) -> EpisodeRates:
    turns = max(1.0, _mean(rows, "turns/mean"))
    sampled, total = _mean(rows, "length/policy_mean"), _mean(rows, "length/total_mean")
    prompt = statistics.fmean(len(t.prompt_ids) for t in kept) if kept else total - sampled
    lengths = [len(turn.token_ids) for t in kept for turn in t.policy_turns]
    spread = statistics.pstdev(lengths) / statistics.fmean(lengths) if lengths else 0.0
    return EpisodeRates(
        prompt_tokens=prompt,
        turns=turns,
        turn_tokens=sampled / turns,
        turn_tokens_spread=spread,
        observation_tokens=max(0.0, total - prompt - sampled) / max(turns - 1, 1e-9) if turns > 1 else 0.0,
    )


def _tool(rows: Sequence[_Row], kept: Sequence[Trajectory]) -> ToolRates:
    """The mean over all calls; how far the slowest lie above it, from the kept trajectories."""
    mean_s = _mean(rows, "tool/wall_s_mean") + _mean(rows, "tool/queue_s_mean")
    waits = [result.wall_s + result.queue_s for t in kept for of_turn in t.results_of_turns() for result in of_turn]
    times = float(np.quantile(waits, 0.99)) / statistics.fmean(waits) if waits and any(waits) else 1.0
    return ToolRates(mean_s, mean_s * min(max(times, 1.0), 14.0))


def _learner(config: RunConfig, rows: Sequence[_Row]) -> LearnerRates:
    """One rank's speed while it computes, and what a step takes besides."""
    tokens = sum(row["tokens/total"] for row in rows)
    busy = [min(row["time/learn_processor_s"], row["time/learn_s"]) for row in rows]
    if _on_gpu(config):
        busy = [row["time/learn_s"] for row in rows]
    rest = statistics.median(row["time/learn_s"] - each for row, each in zip(rows, busy, strict=True))
    return LearnerRates(tokens / sum(busy) / config.learner.ranks, rest if config.buffer.max_staleness == 0 else 0.0)


def _engine(config: RunConfig, rows: Sequence[_Row], kept: Sequence[Trajectory], episode: EpisodeRates) -> EngineRates:
    """A decoding step with one request and with more, from how long the kept episodes took to generate.

    By Little's law `c` requests were decoded at once on average while batches were generated; the episodes that were sampled
    fastest had the engine nearly to themselves.
    """
    each = [t.timings.get("generate_s", 0.0) / sum(len(turn.token_ids) for turn in t.policy_turns) for t in kept]
    if not each:
        raise UserError("the run kept no trajectories (loop.shown_trajectories_per_step=0): measure the engine instead")
    batch = config.loop.groups_per_step * config.loop.group_size
    generating_s = _mean(rows, "time/rollout_s") if config.buffer.max_staleness == 0 else _step_s(rows)
    sampled = batch * episode.turns * episode.turn_tokens
    together = max(1.0, statistics.fmean(each) * sampled / generating_s / config.rollout.workers)
    alone_s = float(np.quantile(each, 0.02))
    worker_s = _growth(rows, "worker/processor_s") / (batch * episode.turns)
    return EngineRates(
        step_s=alone_s,
        step_s_each=max(0.0, statistics.fmean(each) - alone_s) / max(together - 1, 1.0),
        prefill_tokens_per_s=1e9,  # it is within the measured seconds
        turn_s=worker_s,
    )


def _machine(config: RunConfig, rows: Sequence[_Row]) -> MachineRates:
    if _on_gpu(config):
        return MachineRates()
    generating_s = _mean(rows, "time/rollout_s") if config.buffer.max_staleness == 0 else _step_s(rows)
    return MachineRates(
        cores=float(os.cpu_count() or 1),
        engine_cores=_growth(rows, "worker/engine_processor_s") / generating_s / config.rollout.workers,
        learner_cores=float(config.learner.cpu_threads),
        call_core_s=_call_core_s(config, rows),
    )


def _call_core_s(config: RunConfig, rows: Sequence[_Row]) -> float:
    """What is used beside worker, engine and learner (boxes, their engine, the replay buffer, the driver), for each call."""
    learner_s = _mean(rows, "time/learn_processor_s") * config.learner.ranks
    ours_s = _growth(rows, "worker/processor_s") + _growth(rows, "worker/engine_processor_s") + learner_s
    others_s = _growth(rows, "worker/machine_processor_s") - ours_s
    calls = config.loop.groups_per_step * config.loop.group_size * _mean(rows, "tool/calls_per_trajectory")
    return max(others_s / calls, _mean(rows, "tool/cpu_s_mean")) if calls else 0.0


def _growth(rows: Sequence[_Row], name: str) -> float:
    """Of a counter, in a step."""
    return max(0.0, rows[-1][name] - rows[0][name]) / (len(rows) - 1)


def _turn_s(rows: Sequence[_Row]) -> float:
    """Where engines and learner share their memory: what changing turns takes in a step."""
    return statistics.fmean(row.get("time/sleep_s", 0.0) + row.get("time/wake_s", 0.0) for row in rows)


def _step_s(rows: Sequence[_Row]) -> float:
    return (rows[-1]["time_s"] - rows[0]["time_s"]) / (len(rows) - 1)


def _on_gpu(config: RunConfig) -> bool:
    return config.placement.device != "cpu"


def with_engine(rates: Rates, engine: EngineRates) -> Rates:
    """The same with an engine that was measured by itself."""
    measured = replace(engine, turn_s=rates.engine.turn_s)
    return replace(rates, engine=measured, source=f"{rates.source}; the engine measured now")
