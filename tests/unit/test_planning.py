"""The simulation behind `toolrl plan`, against closed forms where there are some and against its own invariants elsewhere."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from toolrl import presets
from toolrl.errors import UserError
from toolrl.planning import Layout, Rates, best_split, simulate
from toolrl.planning.hardware import estimated, least_learner_ranks
from toolrl.planning.processors import Engine, Job, Machine
from toolrl.planning.rates import (
    BufferRates,
    EngineRates,
    EpisodeRates,
    LearnerRates,
    ToolRates,
    WeightRates,
    changed,
    lognormal,
)

LAYOUT = Layout(
    workers=2,
    learner_ranks=1,
    tensor_parallel=1,
    concurrency=16,
    engine_requests=16,
    boxes=0,
    groups_per_step=4,
    group_size=4,
    max_staleness=1,
    max_turns=8,
    park_after_s=1.0,
)
# Every episode alike: one turn of 100 tokens, so that sums can be made by hand.
PLAIN = Rates(
    engine=EngineRates(step_s=0.01, step_s_each=0.001, prefill_tokens_per_s=1e9),
    episode=EpisodeRates(prompt_tokens=0, turns=1, turn_tokens=100, turn_tokens_spread=0),
    tool=ToolRates(0, 0),
    learner=LearnerRates(tokens_per_s=1000, step_s=0.1),
    weights=WeightRates(bytes=1e6, bytes_per_s=1e7, pause_s=0),
    buffer=BufferRates(trajectories_per_s=1e9),
)


def test_an_engine_decodes_all_requests_of_a_step_together() -> None:
    env = simpy.Environment()
    engine = Engine(env, Machine(0), EngineRates(step_s=0.01, step_s_each=0.001, prefill_tokens_per_s=1000), most=2)
    ends: dict[str, float] = {}

    def ask(name: str, tokens: float, context: float) -> simpy.events.ProcessGenerator:
        yield engine.generate(tokens, context)
        ends[name] = env.now

    for name, tokens, context in (("short", 10, 100), ("long", 20, 0), ("queued", 5, 0)):
        env.process(ask(name, tokens, context))
    env.run()
    # 0.1 s of prefill, ten steps of two requests; then five more with the queued one; then one request alone.
    assert ends["short"] == pytest.approx(0.1 + 10 * 0.011)
    assert ends["queued"] == pytest.approx(ends["short"] + 5 * 0.011)
    assert ends["long"] == pytest.approx(ends["queued"] + 5 * 0.01)
    assert engine.busy_s == pytest.approx(ends["long"])


def test_a_machine_slows_everything_by_the_same_factor() -> None:
    env, machine = simpy.Environment(), Machine(1.5)
    ends: dict[str, float] = {}

    def work(name: str, seconds: float, cores: float) -> simpy.events.ProcessGenerator:
        yield Job(env, machine, cores).run(seconds)
        ends[name] = env.now

    env.process(work("one", 3.0, 1.0))
    env.process(work("two", 6.0, 2.0))
    env.run()
    # 3 cores wanted, 1.5 there: half speed until the first is done, then three quarters for the other.
    assert ends["one"] == pytest.approx(6.0)
    assert ends["two"] == pytest.approx(6.0 + 3.0 / 0.75)


def test_taking_turns_costs_the_sum_of_both_halves() -> None:
    found = simulate(PLAIN, replace(LAYOUT, max_staleness=0), steps=5)
    generation = 100 * (0.01 + 7 * 0.001)  # 8 episodes on each of two engines
    learning = 0.1 + 16 * 100 / 1000
    assert found.step_s == pytest.approx(generation + learning + 0.1, rel=1e-6)
    assert found.staleness_max == 0
    assert found.bottleneck.startswith("taking turns")


def test_sharing_a_gpu_costs_the_change_of_turns_in_every_step() -> None:
    apart = replace(LAYOUT, max_staleness=0)
    changing = replace(PLAIN, weights=replace(PLAIN.weights, turn_s=3.0))
    assert simulate(changing, apart).step_s == pytest.approx(simulate(PLAIN, apart).step_s)
    shared = simulate(changing, replace(apart, colocated=True)).step_s
    assert shared == pytest.approx(simulate(PLAIN, apart).step_s + 3.0)


def test_on_a_shared_gpu_staleness_does_not_let_both_halves_work_at_once() -> None:
    stale = replace(LAYOUT, max_staleness=1)
    learning = 0.1 + 16 * 100 / 1000 + 0.1
    assert simulate(PLAIN, stale).step_s == pytest.approx(learning, rel=0.02)
    generation = 100 * (0.01 + 15 * 0.001) / 2  # of two batches at once, 16 episodes on each engine
    assert simulate(PLAIN, replace(stale, colocated=True)).step_s == pytest.approx(generation + learning)


def test_with_staleness_the_slower_half_never_waits() -> None:
    found = simulate(PLAIN, replace(LAYOUT, max_staleness=1), steps=6)
    assert found.step_s == pytest.approx(0.1 + 1.6 + 0.1, rel=0.01)
    assert (found.bottleneck, found.learner_idle) == ("learner", pytest.approx(0, abs=1e-6))
    fast = replace(PLAIN, learner=LearnerRates(tokens_per_s=1e6, step_s=0))
    found = simulate(fast, replace(LAYOUT, max_staleness=3), steps=12)
    assert found.bottleneck == "engines"
    assert found.trajectories_per_s == pytest.approx(2 * 16 / (100 * 0.025), rel=0.1)


def test_a_slow_tool_costs_a_slot_only_until_the_episode_is_parked() -> None:
    slow = replace(PLAIN, tool=ToolRates(20, 20), episode=replace(PLAIN.episode, turns=2.0))
    crowded = replace(LAYOUT, groups_per_step=16, concurrency=4, max_staleness=3)
    parked = simulate(slow, replace(crowded, park_after_s=0.0), steps=6)
    held = simulate(slow, replace(crowded, park_after_s=1e6), steps=6)
    assert parked.trajectories_per_s > 1.5 * held.trajectories_per_s


def test_one_buffer_is_a_limit_of_its_own() -> None:
    slow = replace(PLAIN, buffer=BufferRates(trajectories_per_s=4.0))
    found = simulate(slow, replace(LAYOUT, max_staleness=2), steps=6)
    assert found.bottleneck == "replay buffer"
    assert found.trajectories_per_s == pytest.approx(4.0, rel=0.1)


def test_too_few_interpreters_are_seen_and_mended() -> None:
    busy = replace(PLAIN, tool=ToolRates(2, 6), episode=replace(PLAIN.episode, turns=3.0))
    tight = replace(LAYOUT, boxes=1, groups_per_step=8, max_staleness=2)
    found = simulate(busy, tight, steps=6)
    assert found.bottleneck == "interpreters" and found.box_wait_s > 1
    better = best_split(busy, tight, 3, steps=4)
    assert better.layout.boxes > 1
    assert better.forecast.trajectories_per_s > 1.5 * found.trajectories_per_s


def test_the_split_gives_gpus_to_the_half_that_is_slower() -> None:
    hungry = replace(PLAIN, learner=LearnerRates(tokens_per_s=200, step_s=0))
    many = best_split(hungry, replace(LAYOUT, max_staleness=2), 8, steps=4).layout
    few = best_split(PLAIN, replace(LAYOUT, max_staleness=2), 8, steps=4).layout
    assert many.learner_ranks > few.learner_ranks
    assert many.gpus == few.gpus == 8
    with pytest.raises(ValueError, match="hold no engine"):
        best_split(PLAIN, replace(LAYOUT, tensor_parallel=4), 4, steps=2)


def test_many_engines_are_as_fast_as_a_few_of_them_in_proportion() -> None:
    episode = EpisodeRates(prompt_tokens=50, turns=3, turn_tokens=60)
    varied = replace(PLAIN, episode=episode, tool=ToolRates(0.5, 4), learner=LearnerRates(20_000, 0.05))
    eight = replace(LAYOUT, workers=8, groups_per_step=32, max_staleness=2)
    many = replace(eight, workers=800, learner_ranks=100, groups_per_step=3200)
    small, large = simulate(varied, eight, steps=12), simulate(varied, many, steps=12)
    assert large.trajectories_per_s == pytest.approx(100 * small.trajectories_per_s, rel=0.02)


@settings(max_examples=15, deadline=None)
@given(
    staleness=st.integers(0, 4),
    groups=st.integers(1, 6),
    turns=st.floats(1, 5),
    mean_s=st.floats(0, 3),
    boxes=st.integers(0, 4),
    seed=st.integers(0, 5),
)
def test_the_bound_of_staleness_holds_and_no_part_exceeds_its_limit(
    staleness: int, groups: int, turns: float, mean_s: float, boxes: int, seed: int
) -> None:
    rates = replace(PLAIN, episode=replace(PLAIN.episode, turns=turns), tool=ToolRates(mean_s, 5 * mean_s))
    layout = replace(LAYOUT, max_staleness=staleness, groups_per_step=groups, boxes=boxes)
    found = simulate(rates, layout, steps=4, seed=seed)
    assert found.staleness_max <= staleness
    assert 0 <= found.learner_idle <= 1 and -1e-9 <= found.engine_idle <= 1
    assert found.trajectories_per_s <= found.limits["learner"] * (1 + 1e-9)
    assert found == simulate(rates, layout, steps=4, seed=seed)


@given(mean=st.floats(1e-3, 100), times=st.floats(1, 14))
def test_latencies_have_the_mean_and_the_percentile_that_were_asked_for(mean: float, times: float) -> None:
    mu, sigma = lognormal(mean, mean * times)
    assert math.exp(mu + sigma**2 / 2) == pytest.approx(mean)
    assert math.exp(mu + 2.3263478740408408 * sigma) == pytest.approx(mean * times)


def test_a_latency_is_drawn_from_the_distribution() -> None:
    mu, sigma = lognormal(0.5, 5.0)
    rng = random.Random(0)
    drawn = sorted(rng.lognormvariate(mu, sigma) for _ in range(100_000))
    assert statistics.fmean(drawn) == pytest.approx(0.5, rel=0.05)
    assert drawn[99_000] == pytest.approx(5.0, rel=0.06)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"engine.step": 1}, "did you mean 'engine.step_s'"),
        ({"engine.step_s": 0}, "above 0"),
        ({"tool.p99_s": 0.01}, "between tool.mean_s=0.05"),
        ({"episode.turns": 0.5}, "at least 1"),
        ({"weights.bytes": float("nan")}, "finite"),
        ({"weights.bytes": "much"}, "must be a number"),
    ],
)
def test_rates_that_cannot_be_are_refused(values: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        changed(Rates(), dict(values), "rates.yaml")


def test_estimates_follow_the_model_and_the_gpu() -> None:
    config = presets.load("math-4b")
    slow, fast = estimated(config, "a100-80g"), estimated(config, "h100")
    assert fast.learner.tokens_per_s / slow.learner.tokens_per_s == pytest.approx(989 / 312)
    assert fast.engine.step_s < slow.engine.step_s
    larger = estimated(config, "h100", model_billions=14)
    assert larger.learner.tokens_per_s == pytest.approx(fast.learner.tokens_per_s * 4 / 14)
    assert least_learner_ranks(config, "h100", model_billions=4) == 2
    with pytest.raises(UserError, match=r"raise engine\.tensor_parallel"):
        estimated(config, "l40s", model_billions=32)
    with pytest.raises(UserError, match="did you mean 'h100'"):
        estimated(config, "h10")
