"""Process reflection end to end: a run whose critic is a function, and a critic behind vLLM's own OpenAI server.

The server comes up beside the run, both on the tiny model.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.requirements import need

need("ray", "vllm", "deepspeed")

from actors.engine_setup import engine_environment
from actors.replay import read_trajectories
from toolrl import presets
from toolrl.app import reflecting
from toolrl.app import train as loop
from toolrl.app.cold_start_solvers import programs
from toolrl.app.lessons import taught
from toolrl.app.model_folder import prepare_model
from toolrl.app.parts import start_parts
from toolrl.app.reflecting import Reflection, corrected_sequences, reflect
from toolrl.app.run_folder import RunFolder
from toolrl.app.viewer.view import View
from toolrl.config import RunConfig
from toolrl.config_supervision import ReflectionConfig
from toolrl.monitors.metrics_log import read_metrics
from toolrl.supervision.reflection import Question

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

STEPS, GROUPS, SIZE = 3, 2, 2
SETTINGS = [
    "name=reflected",
    "seed=4",
    "quiet=true",
    "learner.updates_per_batch=1",
    "algorithm.advantage=grpo",
    "rollout.concurrency=4",
    "rollout.max_response_tokens=160",
    "rollout.max_turns=2",
    "sandbox.backend=process",
    "sandbox.min_sessions=1",
    "sandbox.max_sessions=4",
    "buffer.drop_uniform_groups=false",
    "cold_start.steps=0",
    "tasks.held_out_tasks=0",
    f"loop.steps={STEPS}",
    f"loop.groups_per_step={GROUPS}",
    f"loop.group_size={SIZE}",
    "loop.checkpoint_every_steps=1",
    f"supervision.reflection.critic={__name__}:solver",
    "supervision.reflection.wait_s=30",
    "supervision.reflection.learning_rate=1e-2",
]
PLACE = "supervision/reflection/"


def solver(question: Question, settings: ReflectionConfig) -> str:
    """A critic that knows how: it lets the cold start's program compute what the task's answer is."""
    family = question.trajectory.metadata["family"]
    (code,) = programs(family, question.messages[-1]["content"], 1)
    call = {"name": "python", "arguments": {"code": code}}
    return json.dumps({"turns": [{"calls": [call]}, {"text": f"\\boxed{{{question.known_answer}}}"}]})


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    return presets.load("quickstart-cpu", [*SETTINGS, f"runs_dir={tmp_path_factory.mktemp('runs')}"])


@pytest.fixture(scope="module")
def server(
    config: RunConfig, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """vLLM's server on a free port of the loopback; still coming up."""
    RunFolder.create(config)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(prepare_model(config))]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--max-model-len", "2048", "--enforce-eager", "--max-num-seqs", "4"]
    variables = {**os.environ, **engine_environment(config.engine, device="cpu"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = tmp_path_factory.mktemp("server") / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=variables, stdout=out, stderr=out, cwd=Path.cwd())
        try:
            yield f"http://127.0.0.1:{port}", process
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                raise


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def run(config: RunConfig, server: Any):
    folder = RunFolder.create(config)
    with folder.held(), View(config, folder) as view:
        async with start_parts(config, folder) as parts:
            progress = await loop.begin(parts, view)
            await loop._until_trained(
                loop.train_policy(parts, progress, view), loop.keep_rollouts_going(parts, progress)
            )
            yield parts


async def test_corrections_that_hold_are_learnt_and_the_policy_finds_them_likelier(run: Any) -> None:
    rows = read_metrics(run.folder.path)
    said = [{name.removeprefix(PLACE): value for name, value in row.items() if PLACE in name} for row in rows]
    failed = [each for each in read_trajectories(run.folder.ledger) if each.rewards["outcome"] < 1]
    assert len(said) == STEPS and failed, "random weights solve next to nothing"
    for row in said:
        assert row["asked"] == row["answered"] == row["verified"] + row["failed"]
        assert row["references"] == row["verified"] and row["late"] == row["waiting"] == 0
    assert said[0]["asked"] == GROUPS and sum(row["steps"] for row in said) == STEPS
    assert sum(row["verified"] for row in said) >= STEPS and said[-1]["loss"] < said[0]["loss"]


async def test_a_correction_is_what_a_rollout_would_have_been_and_its_turns_are_learnt(run: Any) -> None:
    reflection = run.reflection
    batch = [each for each in read_trajectories(run.folder.ledger) if each.rewards["outcome"] < 1][:1]
    reflection.ask(9, [batch])
    state = reflection.state()  # of a checkpoint while the critic has the question
    await reflection.load_state(state)
    await reflection.settle(60)
    ((step, made),) = reflection.take(9)
    assert step == 9 and made.prompt_ids == batch[0].prompt_ids and made.answer is not None
    setup, task = reflection.setup, reflection.setup.tasks.task(int(batch[0].group_id[1:]))
    messages = [*task.messages, *setup.chat.history(made.turns)]
    assert [result.status for turn in made.turns for result in turn.results] == ["ok"]
    assert setup.chat.prompt_ids(messages[:-1]) == made.token_ids[: -len(made.turns[-1].token_ids)]
    (sequence,) = corrected_sequences([made])
    before = (await run.learner.logprobs([sequence]))[0][sequence.loss_mask].mean()
    lesson = await taught(run.learner, [[made]], 1e-2, corrected_sequences)
    assert lesson.losses == [pytest.approx(-float(before), rel=1e-4)]
    assert (await run.learner.logprobs([sequence]))[0][sequence.loss_mask].mean() > before
    assert (run.folder.checkpoint(STEPS) / reflecting._STATE).is_file()


async def test_a_critic_behind_vllms_server_is_asked_and_held_to_what_it_says(run: Any, server: Any) -> None:
    address, process = server
    await asyncio.to_thread(until_up, address, process)
    failed = [each for each in read_trajectories(run.folder.ledger) if each.rewards["outcome"] < 1][:2]
    wrong = {"turns": [{"calls": [{"name": "python", "arguments": {"code": "print(7)"}}]}, {"text": "\\boxed{7}"}]}
    bound = {"structured_outputs": {"choice": [json.dumps(wrong), json.dumps(wrong).replace("7", "8")]}}
    wanted = ReflectionConfig("chat_completions", f"{address}/v1", "tiny", wait_s=60, deadline_s=60)

    async def asked(settings: ReflectionConfig) -> dict[str, float]:
        with_critic = replace(run.config, supervision=replace(run.config.supervision, reflection=settings))
        async with Reflection.started(with_critic, run.folder.model) as reflection:
            found = await reflect(reflection, run.learner, 1, [[each] for each in failed])
        return {name.removeprefix(PLACE): value for name, value in found.items()}

    free = await asked(replace(wanted, max_tokens=16, prompt="{transcript} {form}"))
    assert free["asked"] == free["failed"] == 2 and free["steps"] == 0, "a random model writes nothing that is a form"
    led = await asked(replace(wanted, max_tokens=300, prompt="{transcript} {form}", extra_body=bound))
    assert led["asked"] == led["answered"] == led["failed/wrong_answer"] == 2 and led["retries"] == 0, led


def until_up(address: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 240
    while True:
        try:
            urllib.request.urlopen(f"{address}/health", timeout=5).close()
            return
        except OSError:
            assert process.poll() is None, "the server ended"
            assert time.monotonic() < deadline, "the server does not come up"
            time.sleep(0.2)
