"""Weight updates of a real engine: exact versions, exact log-probabilities, nothing stale, nothing damaged.

One engine is updated through the file; a second, `cold`, starts from the new weights and is what the first must equal.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from tests.requirements import need

need("vllm")

from actors.engine import Engine, Generated
from actors.engine_errors import WeightsRefused
from actors.weights import Publication, WeightReceiver
from tests.integration import tiny_engines as tiny

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

POLICIES = [tiny.model(0), tiny.model(1)]  # version v has the weights of POLICIES[v % 2]
PROMPT = [(7 * k) % 250 + 2 for k in range(150)]
TEMPERATURE = 0.6


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    engine = await tiny.engine(tiny.folder(tmp_path_factory.mktemp("warm"), 0), "engine-a")
    yield engine
    await engine.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cold(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """Started from the weights of odd versions; recomputes keys and values at an update."""
    place = tiny.folder(tmp_path_factory.mktemp("cold"), 1)
    engine = await tiny.engine(place, "engine-b", version=1, kv_across_updates="recompute")
    yield engine
    await engine.stop()


async def sample(engine: Engine, name: str, prompt: list[int] = PROMPT, tokens: int = 40, seed: int = 5) -> Generated:
    return await engine.generate(
        prompt, max_tokens=tokens, temperature=TEMPERATURE, stop_token_ids=[], seed=seed, request_id=name
    )


def policy_of(version: int) -> torch.nn.Module:
    return POLICIES[version % 2]


def next_version(engine: Engine) -> Publication:
    version = engine.version + 1
    return tiny.publication(policy_of(version), version)  # type: ignore[arg-type]


async def updated_in_the_middle(engine: Engine, seconds: float = 0.15) -> tuple[list[list[int]], list[Generated]]:
    prompts = [[(7 * k + 13 * i) % 250 + 2 for k in range(60 + 10 * i)] for i in range(6)]
    name = f"{engine.name}-{engine.version}"
    running = [asyncio.create_task(sample(engine, f"{name}-{i}", p, tokens=200)) for i, p in enumerate(prompts)]
    await asyncio.sleep(seconds)
    await WeightReceiver(engine).apply(next_version(engine))
    return prompts, list(await asyncio.gather(*running))


async def test_same_prompt_after_an_update_equals_a_cold_engine(engine: Engine, cold: Engine) -> None:
    before = await sample(engine, "before")
    again = await sample(engine, "again")  # from the prefix cache
    assert before.token_ids == again.token_ids
    report = await WeightReceiver(engine).apply(next_version(engine))
    after, expected = await sample(engine, "after"), await sample(cold, "expected")
    assert report["version"] == engine.version == 1
    assert after.weight_versions == [1] * 40
    assert after.token_ids == expected.token_ids != before.token_ids
    assert tiny.gap(after.logprobs, tiny.logprobs(POLICIES[1], PROMPT, after.token_ids, TEMPERATURE)) < tiny.TOLERANCE
    assert await engine.checksums() == await cold.checksums()


async def test_tokens_across_an_update_carry_their_versions_and_the_exact_log_probability(engine: Engine) -> None:
    old = engine.version
    prompts, made = await updated_in_the_middle(engine)
    for prompt, one in zip(prompts, made, strict=True):
        n = one.weight_versions.count(old)
        assert 0 < n < 200, "the update did not fall into the request: the test shows nothing"
        assert one.weight_versions == [old] * n + [old + 1] * (200 - n)
        assert (one.finish_reason, one.started_version) == ("length", old)
        mixed = tiny.logprobs(policy_of(old + 1), prompt, one.token_ids, TEMPERATURE, before=(policy_of(old), n))
        assert tiny.gap(one.logprobs, mixed) < tiny.TOLERANCE
        pure = tiny.logprobs(policy_of(old + 1), prompt, one.token_ids, TEMPERATURE)
        assert tiny.gap(one.logprobs[n:], pure[n:]) > 1e-3  # the keys and values before the update stay the old ones


async def test_recomputed_keys_and_values_leave_no_gap(cold: Engine) -> None:
    old = cold.version
    prompts, made = await updated_in_the_middle(cold)
    for prompt, one in zip(prompts, made, strict=True):
        n = one.weight_versions.count(old)
        assert 0 < n < 200, "the update did not fall into the request: the test shows nothing"
        assert one.weight_versions == [old] * n + [old + 1] * (200 - n)
        for version, part in ((old, slice(0, n)), (old + 1, slice(n, None))):
            trainer = tiny.logprobs(policy_of(version), prompt, one.token_ids, TEMPERATURE)
            assert tiny.gap(one.logprobs[part], trainer[part]) < tiny.TOLERANCE


async def test_a_request_during_the_swap_waits_and_begins_under_the_new_weights(engine: Engine) -> None:
    old, publication = await sample(engine, "cached"), next_version(engine)
    version = publication.version
    async with engine.paused():
        waiting = asyncio.create_task(sample(engine, "waiting"))
        await engine.begin_update()
        tensors = [record.fields() for record in publication.tensors]
        paths = list(publication.paths)
        await engine.transfer({"step": "prepare", "version": version, "paths": paths, "tensors": tensors})
        await engine.finish_update(version, {"step": "apply", "version": version})
        assert not waiting.done()
    one = await waiting
    assert set(one.weight_versions) == {one.started_version} == {version}
    assert one.token_ids != old.token_ids
    trainer = tiny.logprobs(policy_of(version), PROMPT, one.token_ids, TEMPERATURE)
    assert tiny.gap(one.logprobs, trainer) < tiny.TOLERANCE


def damaged(publication: Publication) -> Publication:
    victim = publication.tensors[-1]
    with open(publication.paths[victim.bucket], "r+b") as bucket:
        bucket.seek(victim.offset + victim.nbytes // 2)
        byte = bucket.read(1)[0]
        bucket.seek(-1, 1)
        bucket.write(bytes([byte ^ 1]))
    return publication


def without_last(publication: Publication) -> Publication:
    return replace(publication, tensors=publication.tensors[:-1])


def renamed(publication: Publication) -> Publication:
    last = replace(publication.tensors[-1], name="model.layers.9.mlp.up_proj.weight", checksum="")
    return replace(publication, tensors=(*publication.tensors, last))


def reshaped(publication: Publication) -> Publication:
    first, *rest = publication.tensors
    return replace(publication, tensors=(replace(first, shape=first.shape[::-1], checksum=""), *rest))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (damaged, r"checksum of model\.norm\.weight is \w+, the learner's is \w+"),
        (without_last, r"lacks 1 tensors of the model folder's: model\.norm\.weight"),
        (renamed, r"has unknown 1 tensors of the model folder's: model\.layers\.9"),
        (reshaped, r"model\.embed_tokens\.weight has shape \[64, 256\], the model's is \[256, 64\]"),
    ],
)
async def test_a_spoilt_publication_is_refused_and_the_old_weights_stay(engine: Engine, spoil, message: str) -> None:
    version, held = engine.version, await engine.checksums()
    running = asyncio.create_task(sample(engine, f"during-{spoil.__name__}", tokens=150))
    await asyncio.sleep(0.05)
    with pytest.raises(WeightsRefused, match="engine-a") as refusal:
        await WeightReceiver(engine).apply(spoil(next_version(engine)))
    refusal.match(message)
    assert (engine.version, await engine.checksums()) == (version, held)
    one = await running
    trainer = tiny.logprobs(policy_of(version), PROMPT, one.token_ids, TEMPERATURE)
    assert set(one.weight_versions) == {version}
    assert tiny.gap(one.logprobs, trainer) < tiny.TOLERANCE
    await WeightReceiver(engine).apply(next_version(engine))  # a sound one is then taken
    assert engine.version == version + 1


async def test_of_waiting_publications_the_latest_is_applied_and_old_ones_are_not(engine: Engine) -> None:
    receiver, first = WeightReceiver(engine), engine.version + 1
    publications = [tiny.publication(policy_of(v), v) for v in range(first, first + 5)]  # type: ignore[arg-type]
    reports = await asyncio.gather(*(receiver.apply(each) for each in publications))
    assert [report["version"] for report in reports] == [first + 4] * 5
    assert sum(report["load_s"] > 0 for report in reports) == 1
    late = await receiver.apply(publications[1])
    assert (late["version"], late["load_s"], receiver.version) == (first + 4, 0.0, first + 4)
    one = await sample(engine, "latest")
    trainer = tiny.logprobs(policy_of(first + 4), PROMPT, one.token_ids, TEMPERATURE)
    assert tiny.gap(one.logprobs, trainer) < tiny.TOLERANCE


async def test_an_update_goes_on_when_its_caller_gave_up(engine: Engine) -> None:
    receiver = WeightReceiver(engine)
    publication = next_version(engine)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(receiver.apply(publication), 0.005)
    report = await receiver.apply(publication)  # waits for the one that runs
    assert (report["version"], engine.version) == (publication.version, publication.version)
    assert (await sample(engine, "after-giving-up")).weight_versions == [publication.version] * 40


async def test_an_untied_head_is_updated_time_after_time(tmp_path: Path) -> None:
    policies = [tiny.model(seed, tied=False) for seed in (3, 4)]
    policies[0].save_pretrained(tmp_path)
    engine = await tiny.engine(tmp_path, "engine-c")
    try:
        for version in range(1, 5):  # the first by vLLM's loader, the others by the routes learned from it
            policy = policies[version % 2]
            await WeightReceiver(engine).apply(tiny.publication(policy, version, bucket_bytes=1 << (14 + version)))
            one = await sample(engine, f"untied-{version}")
            trainer = tiny.logprobs(policy, PROMPT, one.token_ids, TEMPERATURE)
            assert tiny.gap(one.logprobs, trainer) < tiny.TOLERANCE
    finally:
        await engine.stop()
