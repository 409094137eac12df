"""Cold start with the real parts: programs run in the sandbox, traces are learnt by a DeepSpeed rank in a Ray actor."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from tests.requirements import need

need("ray", "deepspeed", "torch", "transformers")

import ray
import torch
from transformers import AutoModelForCausalLM

from actors.learner_group import LearnerGroup
from toolrl import presets
from toolrl.app.cold_start import ColdStartReport, cold_start, generate_traces, read_traces
from toolrl.app.model_folder import prepare_model
from toolrl.app.run_folder import RunFolder
from toolrl.config import RunConfig
from toolrl.trajectory import Trajectory


class Notes:
    """Keeps what a cold start says."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def stage(self, text: str) -> None:
        self.said.append(text)

    def note(self, text: str) -> None:
        self.said.append(text)


def settings(runs_dir: Path, *overrides: str) -> RunConfig:
    return presets.load(
        "quickstart-cpu",
        [
            f"runs_dir={runs_dir}",
            "sandbox.min_sessions=1",
            "sandbox.max_sessions=2",
            "cold_start.traces=48",
            "cold_start.batch_size=16",
            "cold_start.steps=12",
            "cold_start.warmup_steps=2",
            *overrides,
        ],
    )


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, RunFolder, ColdStartReport, list[str], Path]:
    """One cold start, from nothing to an exported model."""
    config = settings(tmp_path_factory.mktemp("runs"))
    folder = RunFolder.create(config)
    prepare_model(config)
    view = Notes()

    async def run() -> ColdStartReport:
        learner = await LearnerGroup.start(config, str(folder.model))
        report = await cold_start(config, folder, learner, view)
        await learner.export(str(folder.cold_start / "model"))
        await learner.stop()
        return report

    ray.init(address="local", include_dashboard=False, num_cpus=2, log_to_driver=False)
    try:
        report = asyncio.run(run())
    finally:
        ray.shutdown()
    return config, folder, report, view.said, folder.cold_start / "model"


def test_the_results_in_the_traces_come_from_the_sandbox(started: tuple) -> None:
    _, folder, *_ = started
    traces = read_traces(folder.cold_start / "traces.parquet")
    assert len(traces) == 48
    results = [result for trace in traces for turn in trace.turns for result in turn.results]
    statuses = Counter(result.status for result in results)
    assert statuses["ok"] >= 10
    assert statuses["error"] >= 1  # failures on purpose
    assert statuses["invalid_call"] >= 1
    assert all(result.wall_s > 0 for result in results if result.status == "ok")
    solved = [trace for trace in traces if trace.metadata["kind"] == "solved" and trace.turns[-2:-1]]
    for trace in solved:
        last = trace.turns[-2].results[-1]
        if last.status == "ok":
            assert trace.answer == last.text


async def test_the_same_seed_gives_the_same_traces_in_another_sandbox(started: tuple) -> None:
    config, folder, *_ = started
    again = await generate_traces(config, folder.model)
    assert [t.token_ids for t in again] == [t.token_ids for t in read_traces(folder.cold_start / "traces.parquet")]


def test_the_loss_falls_and_the_exported_model_is_the_trained_one(started: tuple) -> None:
    config, folder, report, said, exported = started
    assert len(report.losses) == config.cold_start.steps
    assert report.losses[0] > 5.0  # 512 tokens, none known yet
    assert report.losses[-1] < report.losses[0] - 2.0
    traces = read_traces(folder.cold_start / "traces.parquet")
    before, after = (policy_loss(folder_, traces) for folder_ in (folder.model, exported))
    assert before == pytest.approx(report.losses[0], abs=0.3)
    assert after < before - 2.0
    assert any("48 traces" in text for text in said)
    assert any("step 12 of 12" in text for text in said)


def policy_loss(model_dir: Path, traces: list[Trajectory]) -> float:
    """Mean negative log-likelihood of a policy token, computed by transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    losses = []
    with torch.no_grad():
        for trace in traces:
            ids = torch.tensor([trace.token_ids])
            logp = model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            response = logp[len(trace.prompt_ids) - 1 :]
            losses += [-float(value) for value, mine in zip(response, trace.policy_mask(), strict=True) if mine]
    return sum(losses) / len(losses)
