"""A real engine that is given a bare adapter, version after version, serves what the learner holds: one engine for the file."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from tests.requirements import need

need("vllm", "accelerate", "peft")

from actors.engine import Engine, EngineError, EngineStartFailed, Generated
from actors.engine_errors import WeightsRefused
from actors.weights import Publication, Publisher, WeightChannel, WeightReceiver
from actors.weights.served_adapter import ServedAdapter
from learner import lora
from learner.policy import choose_trained
from learner.weight_source import AdapterSource, WeightSource
from tests.integration import tiny_engines as tiny
from toolrl.config import LoraConfig

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PROMPT = [(7 * k) % 250 + 2 for k in range(150)]
TEMPERATURE = 0.6
LORA = LoraConfig(rank=4, alpha=6.0, publish="adapter")
PUBLISHERS: list[Publisher] = []


def policy(version: int) -> Any:
    """What the learner holds at a version, the adapter beside the weights; version 0 is the model folder's."""
    model = tiny.model(0)
    choose_trained(model, adapter=LORA, frozen=[], seed=0)
    generator = torch.Generator().manual_seed(version)
    with torch.no_grad():
        for parameter in model.parameters():
            if version and parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)
    return model


def merged(version: int) -> Any:
    """The same as one set of weights, whose keys and values can be cached."""
    model = tiny.model(0)
    model.load_state_dict({name: tensor.clone() for name, tensor in WeightSource(policy(version))}, strict=False)
    return model


def publication(version: int) -> Publication:
    model = policy(version)
    PUBLISHERS.append(Publisher(bucket_bytes=1 << 14))
    published = PUBLISHERS[-1].publish(AdapterSource(model), version)
    settings = lora.peft_settings(LORA, model, "model")
    return replace(published, adapter=settings, merged_nbytes=WeightSource(model).nbytes())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    made = await tiny.engine(tiny.folder(tmp_path_factory.mktemp("model"), 0), "engine-a", adapter=LORA)
    yield made
    await made.stop()


async def sample(engine: Engine, request: str, tokens: int = 60, seed: int = 5) -> Generated:
    return await engine.generate(
        PROMPT, max_tokens=tokens, temperature=TEMPERATURE, stop_token_ids=[], seed=seed, request_id=request
    )


async def check_serves(engine: Engine, version: int, request: str) -> Generated:
    """As the learner computes it, with the adapter beside the weights, and as the merged weights give it."""
    one = await sample(engine, request)
    assert one.weight_versions == [version] * 60 and one.started_version == version
    for model in (policy(version), merged(version)):
        assert tiny.gap(one.logprobs, tiny.logprobs(model, PROMPT, one.token_ids, TEMPERATURE)) < tiny.TOLERANCE
    return one


async def test_each_version_is_served_exactly_and_none_from_the_cache_of_another(engine: Engine) -> None:
    receiver = WeightReceiver(engine)
    made = [await check_serves(engine, 0, "untrained")]
    for version in (1, 2):
        published = publication(version)
        report = await receiver.apply(published)
        assert (report["version"], report["checksum"]) == (version, published.checksum)
        assert report["bytes"] == published.nbytes and report["paused_s"] > 0
        made += [await check_serves(engine, version, f"first-{version}")]
        again = await check_serves(engine, version, f"again-{version}")  # the prompt from the prefix cache
        assert again.token_ids == made[-1].token_ids
    assert len({tuple(one.token_ids) for one in made}) == 3
    assert published.share == pytest.approx(published.nbytes / published.merged_nbytes) and published.share < 0.3


async def test_a_request_that_spans_an_update_goes_on_under_the_next_adapter(engine: Engine) -> None:
    running = [asyncio.create_task(sample(engine, f"spans-{k}", tokens=200, seed=k)) for k in range(4)]
    await asyncio.sleep(0.25)
    await WeightReceiver(engine).apply(publication(3))
    for one in await asyncio.gather(*running):
        n = one.weight_versions.count(2)
        assert 0 < n < 200, "the update did not fall into the request: the test shows nothing"
        assert one.weight_versions == [2] * n + [3] * (200 - n)
        mixed = tiny.logprobs(merged(3), PROMPT, one.token_ids, TEMPERATURE, before=(merged(2), n))
        assert tiny.gap(one.logprobs, mixed) < tiny.TOLERANCE
    await check_serves(engine, 3, "after")


def damaged(good: Publication) -> Publication:
    victim = good.tensors[-1]
    with open(good.paths[victim.bucket], "r+b") as bucket:
        bucket.seek(victim.offset + victim.nbytes // 2)
        byte = bucket.read(1)[0]
        bucket.seek(-1, 1)
        bucket.write(bytes([byte ^ 1]))
    return good


def half_a_pair(good: Publication) -> Publication:
    return replace(good, tensors=good.tensors[:-1])


def without_a_layer(good: Publication) -> Publication:
    return replace(good, tensors=tuple(record for record in good.tensors if "layers.1.mlp.up_proj" not in record.name))


def of_another_rank(good: Publication) -> Publication:
    return replace(good, adapter={**good.adapter, "r": 2})  # type: ignore[dict-item]


def of_another_model(good: Publication) -> Publication:
    return replace(good, tensors=tuple(replace(r, name=r.name.replace("layers.1", "layers.9")) for r in good.tensors))


def whole_weights(good: Publication) -> Publication:
    return replace(good, adapter=None)


async def test_what_is_damaged_or_foreign_is_refused_and_the_old_adapter_stays(engine: Engine) -> None:
    receiver, version = WeightReceiver(engine), engine.version
    running = asyncio.create_task(sample(engine, "during", tokens=150))
    for spoil, message in (
        (damaged, r"checksum of .*lora_B\.weight is \w+, the learner's is"),
        (half_a_pair, "has one of A and B only"),
        (without_a_layer, "has not the tensors that it had before: .*up_proj"),
        (of_another_rank, r"has shape \[4, 64\], it must be \[2, 64\]"),
        (of_another_model, "layers.9.* a weight that the model folder does not have"),
        (whole_weights, "these are whole weights"),
    ):
        with pytest.raises(WeightsRefused, match=f"engine-a keeps version {version}: .*{message}"):
            await receiver.apply(spoil(publication(version + 1)))
    assert (await running).weight_versions == [version] * 150
    await check_serves(engine, version, "still")
    with pytest.raises(EngineError, match="cannot give its weights up"):
        await engine.sleep()


async def test_one_that_joins_is_given_the_latest_and_a_failed_load_makes_no_text(engine: Engine) -> None:
    channel = WeightChannel(deadline_s=30.0)
    await channel.publish(publication(7))  # nobody there yet
    await channel.join("engine-a", WeightReceiver(engine).apply)
    assert engine.version == 7 and not channel.behind
    broken = publication(8)
    delivery = await channel.publish(replace(broken, adapter={**broken.adapter, "use_dora": True}))  # type: ignore[dict-item]
    assert "UpdateFailed" in delivery.behind["engine-a"]
    with pytest.raises(EngineError, match="without valid weights"):
        await sample(engine, "broken")
    (await channel.publish(publication(9))).require_all()
    await check_serves(engine, 9, "mended")


async def test_layers_that_vllm_cannot_adapt_are_named_before_anything_is_trained(
    engine: Engine, tmp_path: Path
) -> None:
    adapter = replace(LORA, target_modules=["q_proj", "embed_tokens"])
    with pytest.raises(EngineStartFailed, match="cannot serve an adapter of this kind"):
        await ServedAdapter.begin(engine, str(tiny.folder(tmp_path, 0)), adapter)
