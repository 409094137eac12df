"""The learner as Ray actors: real DeepSpeed ranks over gloo."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time

import numpy as np
import pytest

from tests.requirements import need

need("ray", "deepspeed", "torch", "transformers")

import ray

from actors.learner_group import LearnerGroup, LearnerLost
from learner.sequence import TrainSequence
from tests.unit.learner_fixtures import random_sequences
from toolrl.app.tiny_model import write_tiny_model
from toolrl.config import LearnerConfig, ModelConfig, RunConfig


@pytest.fixture(scope="module")
def cluster():
    ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, 0)
    return str(folder)


def run_config(ranks: int, **learner: object) -> RunConfig:
    settings = LearnerConfig(ranks=ranks, learning_rate=1e-3, updates_per_batch=2, **learner)
    return RunConfig(model=ModelConfig(dtype="float32"), learner=settings)


async def test_two_ranks_train_publish_save_and_survive_garbage_collection(cluster, model_dir, tmp_path):
    group = await LearnerGroup.start(run_config(2), model_dir)
    with pytest.raises(ValueError, match="no sequences"):
        await group.train([])
    sequences = random_sequences(8)
    before = await group.checksums()
    metrics = await group.train(sequences)
    gc.collect()
    assert np.isfinite(metrics["loss/policy"]) and metrics["skipped_steps"] == 0
    assert metrics["tokens/policy"] == sum(int(s.policy_mask.sum()) for s in sequences)
    after = await group.checksums()
    assert all(before[name] != after[name] for name in before)

    publication = await group.publish(3)
    assert publication.version == 3
    assert [record.name for record in publication.tensors] == list(after)

    await group.save(str(tmp_path / "checkpoint"))
    logps = await group.logprobs(sequences)
    await group.supervised(sequences, 1e-2)
    assert await group.checksums() != after
    await group.load(str(tmp_path / "checkpoint"))
    assert await group.checksums() == after
    for now, then in zip(await group.logprobs(sequences), logps, strict=True):
        np.testing.assert_array_equal(now, then)
    await group.stop()


async def test_a_rank_that_dies_is_named_at_once(cluster, model_dir):
    group = await LearnerGroup.start(run_config(2), model_dir)
    pids = await group.call("pid")
    work = asyncio.ensure_future(group.train(endless(random_sequences(8))))
    await asyncio.sleep(0.5)
    os.kill(pids[1], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(LearnerLost, match="rank 1 died during 'train_batch'"):
        await work
    assert time.monotonic() - began < 20


async def test_a_rank_that_hangs_is_named_at_the_deadline(cluster, model_dir):
    group = await LearnerGroup.start(run_config(2, step_deadline_s=4.0), model_dir)
    pids = await group.call("pid")
    os.kill(pids[1], signal.SIGSTOP)
    try:
        with pytest.raises(LearnerLost, match="rank 1 silent: 'train_batch'"):
            await group.train(random_sequences(8))
    finally:
        os.kill(pids[1], signal.SIGKILL)


def endless(sequences: list[TrainSequence]) -> list[TrainSequence]:
    """Work for several seconds."""
    return sequences * 400
