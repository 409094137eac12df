"""The learner as Ray actors: real DeepSpeed ranks over gloo."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from tests.requirements import need

need("ray", "deepspeed", "torch", "transformers")

import ray

from actors.learner_group import LearnerGroup, LearnerLost
from actors.weights.gloo_group import GlooGroup
from learner.sequence import TrainSequence
from tests.unit.learner_fixtures import random_sequences
from toolrl.app.tiny_model import write_tiny_model
from toolrl.config import LearnerConfig, ModelConfig, RunConfig, WeightsConfig


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


class Dying:
    """A rollout worker whose machine goes in the middle of an update."""

    def __init__(self) -> None:
        self.threads = ThreadPoolExecutor(1)

    def weight_step(self, name: str, argument: Any = None) -> None:
        if name == "connect":
            place = argument["address"], argument["port"]
            options = {"rank": 1, "size": argument["size"], "deadline_s": argument["deadline_s"]}
            self.group = self.threads.submit(GlooGroup.join, *place, **options)
        elif name == "update":
            assert len(argument["tensors"]) > 10
            os._exit(1)


async def test_an_engine_that_dies_in_an_update_harms_no_rank(cluster, model_dir):
    config = run_config(2, zero_stage=3)
    config.weights = WeightsConfig(transport="gloo", deadline_s=30, bucket_mib=1)
    group = await LearnerGroup.start(config, model_dir)
    first = await group.publish(1)
    worker = ray.remote(Dying).options(num_cpus=0).remote()
    await worker.weight_step.remote("probe")
    sent = await group.send(2, {"rollout-0": worker})
    assert (sent.version, sent.applied, sent.left_out) == (2, {}, {}) and "rollout-0" in sent.broke
    assert sent.connect_s > 0 and sent.gather_s > 0 and sent.nbytes == first.nbytes
    assert list((await group.send(3, {"rollout-0": worker})).left_out) == ["rollout-0"]
    again = await group.publish_again()
    assert (again.version, again.checksum) == (3, first.checksum)

    training = asyncio.create_task(group.train(random_sequences(8)))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(group.publish_again())
    assert np.isfinite((await training)["loss/policy"])
    await asyncio.sleep(0.1)
    assert not waiting.done()  # the weights of now are no version yet
    published = await group.publish(4)
    again = await asyncio.wait_for(waiting, 60)
    assert (again.version, again.checksum) == (4, published.checksum) and again.checksum != first.checksum
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
    """Work for several seconds on the fastest machine; it is not waited for."""
    return sequences * 4000
