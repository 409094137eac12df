"""The real vLLM engine on a tiny model, against transformers in float32. One engine for the whole file."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import torch

from tests.requirements import need

need("vllm")

from actors.engine import Engine, EngineDied, Generated, WeightsUnavailable
from actors.engine_errors import WeightsRefused
from actors.weights import WeightReceiver
from tests.integration import tiny_engines as tiny

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

POLICY = tiny.model(0)
PROMPT = [(7 * k) % 250 + 2 for k in range(90)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    engine = await tiny.engine(tiny.folder(tmp_path_factory.mktemp("engine"), 0), "engine-a")
    yield engine
    await engine.stop()


async def sample(
    engine: Engine, name: str, prompt: list[int] = PROMPT, tokens: int = 40, **options: object
) -> Generated:
    settings: dict[str, object] = {"temperature": 0.6, "stop_token_ids": [], "max_tokens": tokens} | options
    return await engine.generate(prompt, request_id=name, **settings)  # type: ignore[arg-type]


async def test_every_token_has_the_trainers_log_probability(engine: Engine) -> None:
    prompts = [[(11 * i + 5 * k) % 250 + 2 for k in range(20 + 9 * i)] for i in range(16)]
    made = await asyncio.gather(*(sample(engine, f"gap-{i}", prompt) for i, prompt in enumerate(prompts)))
    for prompt, one in zip(prompts, made, strict=True):
        assert len(one.token_ids) == len(one.logprobs) == len(one.weight_versions) == 40
        assert tiny.gap(one.logprobs, tiny.logprobs(POLICY, prompt, one.token_ids, 0.6)) < tiny.TOLERANCE


async def test_log_probabilities_are_those_of_the_truncated_distribution(engine: Engine) -> None:
    one = await sample(engine, "top-k", top_k=5)
    ids = torch.tensor([[*PROMPT, *one.token_ids]])
    with torch.no_grad():
        logits = POLICY(ids).logits[0, len(PROMPT) - 1 : -1] / 0.6
    kept = logits.masked_fill(logits < logits.topk(5).values[:, -1:], float("-inf"))
    chosen = torch.log_softmax(kept, -1).gather(1, ids[0, len(PROMPT) :, None])[:, 0].tolist()
    assert tiny.gap(one.logprobs, chosen) < tiny.TOLERANCE


async def test_a_sampled_stop_token_is_part_of_the_tokens(engine: Engine) -> None:
    free = await sample(engine, "free", seed=3)
    stop = free.token_ids[17]
    first = free.token_ids.index(stop)
    stopped = await sample(engine, "stopped", seed=3, stop_token_ids=[stop])
    assert stopped.finish_reason == "stop"
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert tiny.gap(stopped.logprobs, free.logprobs[: first + 1]) < tiny.TOLERANCE


async def test_only_named_tokens_end_a_request(engine: Engine) -> None:
    eos = POLICY.config.eos_token_id
    assert eos is not None
    made = await asyncio.gather(*(sample(engine, f"eos-{i}", tokens=200, temperature=2.0, seed=i) for i in range(16)))
    assert any(eos in one.token_ids for one in made), "none sampled the model's own end token: the test shows nothing"
    assert all(one.finish_reason == "length" and len(one.token_ids) == 200 for one in made)


async def test_same_seed_same_tokens_alone_and_in_company(engine: Engine) -> None:
    alone = await sample(engine, "alone", seed=11)
    again = await sample(engine, "again", seed=11)
    company = [sample(engine, f"other-{i}", seed=100 + i) for i in range(20)]
    accompanied, *others = await asyncio.gather(sample(engine, "accompanied", seed=11), *company)
    assert alone.token_ids == again.token_ids == accompanied.token_ids
    assert alone.logprobs == again.logprobs
    assert others[0].token_ids != alone.token_ids


async def test_seeded_requests_beyond_one_steps_token_budget(engine: Engine) -> None:
    # vLLM's CPU backend dies when such a request is prefilled in parts; see `engine_setup`.
    prompts = [[(3 * i + k) % 250 + 2 for k in range(120)] for i in range(64)]
    made = await asyncio.gather(*(sample(engine, f"many-{i}", p, tokens=3, seed=i) for i, p in enumerate(prompts)))
    assert [len(one.token_ids) for one in made] == [3] * 64


async def test_context_used_up_ends_with_length_and_too_long_a_prompt_is_an_error(engine: Engine) -> None:
    long = [k % 250 + 2 for k in range(tiny.CONTEXT - 10)]
    one = await sample(engine, "long", long, tokens=50)
    assert (len(one.token_ids), one.finish_reason) == (10, "length")
    with pytest.raises(ValueError, match=str(tiny.CONTEXT)):
        await sample(engine, "too-long", [5] * (tiny.CONTEXT + 1))


async def test_abort_returns_what_was_sampled(engine: Engine) -> None:
    running = asyncio.create_task(sample(engine, "aborted", tokens=400))
    await asyncio.sleep(0.1)
    await engine.abort("aborted")
    one = await asyncio.wait_for(running, 10)
    assert one.finish_reason == "abort"
    assert len(one.token_ids) == len(one.logprobs) < 400


async def test_cancelled_call_leaves_a_working_engine(engine: Engine) -> None:
    running = asyncio.create_task(sample(engine, "cancelled", tokens=400))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len((await sample(engine, "after")).token_ids) == 40


async def test_requests_outlast_a_sleep_that_keeps_the_weights(engine: Engine) -> None:
    whole = await sample(engine, "whole", tokens=300, seed=1)
    running = asyncio.create_task(sample(engine, "interrupted", tokens=300, seed=1))
    await asyncio.sleep(0.05)
    await engine.sleep(level=1)
    waiting = asyncio.create_task(sample(engine, "waits", seed=1))
    await asyncio.sleep(0.5)
    assert engine.is_asleep and not running.done() and not waiting.done()
    with pytest.raises(WeightsRefused, match="engine-a keeps version 0: it is asleep"):
        await WeightReceiver(engine).apply(tiny.publication(POLICY, 1))
    await engine.wake_weights()
    await engine.wake_cache()
    interrupted = await running
    assert interrupted.token_ids == whole.token_ids  # though its keys and values were computed anew
    assert tiny.gap(interrupted.logprobs, whole.logprobs) < tiny.TOLERANCE
    assert (await waiting).token_ids == whole.token_ids[:40]
    assert not engine.is_asleep


async def test_woken_without_weights_raises_and_makes_no_text(engine: Engine) -> None:
    before = await sample(engine, "awake", seed=1)
    running = asyncio.create_task(sample(engine, "cut-off", tokens=400))
    await asyncio.sleep(0.1)
    await engine.sleep()
    waiting = asyncio.create_task(sample(engine, "asleep"))
    await engine.wake_weights()
    assert not running.done() and not waiting.done()
    await engine.wake_cache()
    for request in (running, waiting):
        with pytest.raises(WeightsUnavailable, match=r"engine-a is without valid weights \(asleep\); apply"):
            await request
    report = await WeightReceiver(engine).apply(tiny.publication(POLICY, engine.version))
    assert report["version"] == engine.version == 0
    assert (await sample(engine, "reloaded", seed=1)).token_ids == before.token_ids


async def test_weights_arrive_before_the_cache_is_back_and_requests_go_on_with_them(engine: Engine) -> None:
    other = tiny.model(1)
    running = asyncio.create_task(sample(engine, "spans", tokens=300))
    await asyncio.sleep(0.1)
    await engine.sleep()
    await engine.wake_weights()
    await WeightReceiver(engine).apply(tiny.publication(other, 1))
    assert engine.is_asleep and not running.done()
    await engine.wake_cache()
    made = await running
    assert sorted(set(made.weight_versions)) == [0, 1]
    later = made.weight_versions.index(1)
    by_new = tiny.logprobs(other, PROMPT, made.token_ids, 0.6)  # no key of the old weights is left
    assert tiny.gap(made.logprobs[later:], by_new[later:]) < tiny.TOLERANCE
    await WeightReceiver(engine).apply(tiny.publication(POLICY, 2))


async def test_a_dead_engine_is_named(engine: Engine) -> None:
    (process,) = [child for child in multiprocessing.active_children() if "EngineCore" in child.name]
    running = asyncio.create_task(sample(engine, "bereft", tokens=400))
    await asyncio.sleep(0.1)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EngineDied, match="engine-a"):
        await asyncio.wait_for(running, 20)
    with pytest.raises(EngineDied, match="engine-a"):
        await sample(engine, "too-late")
    with pytest.raises(EngineDied, match="engine-a"):
        await engine.check()
