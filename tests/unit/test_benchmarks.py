"""Benchmarks: each is found and offers its options; their cases and ratios are right. Nothing is measured here."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks import gpu_check, learner, trl
from benchmarks.sides.cases import GROUP, Case, padded_width, samples
from benchmarks.sides.slow_calculator import slow_calculator
from benchmarks.sides.trl_tool import FAILURES, SCHEMA, computed, in_process
from toolrl import presets
from toolrl.app.cli import bench
from toolrl.config import ToolConfig
from toolrl.tools.toolbox import TRANSIENT_ERRORS
from toolrl.trajectory import ToolCall

ROOT = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize("name", ["async", "learner", "replay", "rollout", "sandbox", "trl", "weights"])
def test_a_benchmark_is_listed_with_what_it_measures(name: str) -> None:
    found = bench.benchmarks()
    assert len(bench._description(found[name])) > 40


def test_what_is_no_benchmark_is_not_listed() -> None:
    assert not {"gpu-check", "sandbox-soak", "sides"} & set(bench.benchmarks())


def test_a_benchmark_gets_the_options_that_it_has() -> None:
    assert bench._parameters(ROOT / "learner.py") == {"quick", "trl"}
    assert bench._parameters(ROOT / "trl.py") == {"quick", "trl", "folder"}
    assert bench._parameters(ROOT / "async.py") == {"quick"}
    assert bench._parameters(ROOT / "replay.py") == set()


async def test_a_slow_calculator_takes_the_same_time_for_the_same_call_and_none_when_switched_off(
    tmp_path: Path,
) -> None:
    options = {"latency": {"mean_s": 0.02, "p99_s": 0.2}, "at_once": str(tmp_path / "at-once")}
    tool = slow_calculator(ToolConfig("slow", options=options), None)
    call = ToolCall("call_0", "calculator", {"expression": "2 + 3"})

    async def times(episode: str) -> list[float]:
        found = []
        async with tool.session(episode) as session:
            for _ in range(3):
                began = time.perf_counter()
                assert (await session.call(call)).text == "5"
                found.append(time.perf_counter() - began)
        return found

    for took, drawn in zip(await times("g0.1"), [tool.latency.draw(f"g0.1/{n}") for n in (1, 2, 3)], strict=True):
        assert took >= drawn
    (tmp_path / "at-once").touch()
    slowest = max(range(1000), key=lambda n: tool.latency.draw(f"g{n}.0/1"))
    assert tool.latency.draw(f"g{slowest}.0/1") > min(await times(f"g{slowest}.0"))


def test_cases_are_the_same_in_every_process_and_groups_share_their_prompt() -> None:
    case = Case(50, 3, 1)
    first, again = samples(case), samples(case)
    assert len(first) == 3 * GROUP
    for one, other in zip(first, again, strict=True):
        assert (one.response == other.response).all() and one.advantage == other.advantage
    prompts = {sample.group: sample.prompt for sample in first}
    assert all((sample.prompt == prompts[sample.group]).all() for sample in first)
    assert all(40 <= len(prompt) <= 60 for prompt in prompts.values())


def test_a_sample_begins_and_ends_with_the_policy_and_has_tool_tokens_between_its_turns() -> None:
    for sample in samples(Case(50, 3, 1)):
        assert sample.mask[0] and sample.mask[-1]
        edges = np.flatnonzero(np.diff(sample.mask.astype(int)))
        assert len(edges) == 2 * sample.turns.max()
        assert len(sample.turns) == len(sample.response)
        assert sample.tokens == len(sample.prompt) + len(sample.response) - 1


def test_advantages_are_rewards_normalised_in_their_group() -> None:
    made = samples(Case(50, 2, 1))
    for group in range(2):
        members = [sample for sample in made if sample.group == group]
        rewards = np.array([sample.reward for sample in members])
        wanted = (rewards - rewards.mean()) / (np.std(rewards, ddof=1) + 1e-4)
        assert np.allclose([sample.advantage for sample in members], wanted)


def test_a_padded_row_holds_the_longest_prompt_beside_the_longest_response() -> None:
    made = samples(Case(50, 3, 1))
    assert padded_width(made) >= max(len(s.prompt) + len(s.response) for s in made)
    assert padded_width(made) in {len(a.prompt) + len(b.response) for a in made for b in made}


def test_groups_that_do_not_part_into_the_updates_are_refused() -> None:
    with pytest.raises(ValueError, match="3 groups"):
        Case(50, 3, 2)
    for case in [*learner.CASES, *learner.QUICK_CASES]:
        assert case.groups * GROUP % case.updates == 0


def test_a_row_gives_tokens_by_the_second_and_its_ratios() -> None:
    case = Case(50, 1, 1)

    def turn(factor: float) -> learner.Turn:
        seconds = {"learner": 1.0, "padded": 2.0, "TRL": 3.0, "floor": 0.9}
        peaks = {"learner": 10.0, "padded": 30.0, "TRL": 40.0, "floor": 99.0}
        return {
            name: {"seconds": factor * each, "peak_mib": peaks[name], "norm": 1.0} for name, each in seconds.items()
        }

    found = learner.row(case, [turn(1.0), turn(2.0), turn(4.0)])
    tokens = sum(sample.tokens for sample in samples(case))
    assert found["learner tokens/s"] == pytest.approx(tokens / 2)
    assert found["TRL tokens/s"] == pytest.approx(tokens / 6)
    assert (found["times TRL"], found["times padded"]) == (pytest.approx(3), pytest.approx(2))
    assert found["share of the floor"] == pytest.approx(0.9)
    assert found["share of TRL's memory"] == pytest.approx(0.25)


def test_a_ratio_is_taken_turn_by_turn() -> None:
    assert learner.ratio([2.0, 30.0, 3.0], [1.0, 10.0, 1.0]) == 3.0


@pytest.mark.parametrize("name", ["padded", "TRL"])
def test_sides_that_make_another_update_are_refused(name: str) -> None:
    norms = {"learner": 1.0, "padded": 1.0, "TRL": 1.0, "floor": 0.0}
    learner.check_norms(norms, Case(50, 1, 1))
    with pytest.raises(RuntimeError, match=name):
        learner.check_norms(norms | {name: 1.01}, Case(50, 1, 1))
    with pytest.raises(RuntimeError, match=name):
        learner.check_norms(norms | {name: float("nan")}, Case(50, 1, 1))


def test_the_gpu_check_counts_the_models_work() -> None:
    size = gpu_check.TINY
    made = gpu_check.sequences(size, 256, 64, seed=0)
    lengths = [len(sequence.token_ids) - 1 for sequence in made]
    predicted = sum(int(sequence.policy_mask.sum()) for sequence in made)
    body, head = 100_000, size.vocabulary * size.hidden
    attention = size.layers * size.heads * size.head_dim * sum(length**2 for length in lengths)
    wanted = 6 * (body * sum(lengths) + head * predicted + attention)
    assert gpu_check.flops(size, made, body + head) == pytest.approx(wanted)


def test_the_gpu_checks_groups_share_their_prompt_and_sequences_have_a_hole() -> None:
    made = gpu_check.sequences(gpu_check.TINY, 256, 64, seed=0, group=4)
    prompts = {tuple(sequence.token_ids[: sequence.prompt_length]) for sequence in made}
    assert 4 * len(prompts) == len(made)
    assert all(not sequence.policy_mask.all() and sequence.policy_mask[-1] for sequence in made)


def test_the_gpu_check_runs_its_logic_on_a_cpu() -> None:
    found = gpu_check.measure(gpu_check.TINY, 64, 32)
    assert found["tokens_per_s"] > 0 and found["times_padded"] > 0 and found["share_of_floor"] > 0
    assert found["mfu"] is None and found["peak_gib"] is None


def test_a_run_beside_trl_is_what_both_sides_were_promised(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages }}")
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(trl.settings("run", "tiny:qwen3", template, start_steps=0, batches=3)))
    config = presets.load(str(file))
    assert (config.loop.steps, config.loop.groups_per_step, config.loop.group_size) == (3, 16, 8)
    assert (config.learner.learning_rate, config.learner.updates_per_batch) == (1e-4, 4)
    assert [tool.failure_rate for tool in config.tools] == [0.2]
    assert [family.name for family in config.tasks.families] == ["chain_sum"]
    assert config.tasks.families[0].options == {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2}
    assert config.cold_start.steps == 0
    # What is compared is the reward for the right answer; GTPO's shaping is part of our objective, as in the quickstart.
    assert [part.name for part in config.rewards.components] == ["outcome", "code_similarity"]


def test_both_sides_show_the_model_the_same_tool_and_fail_alike() -> None:
    from transformers.utils import get_json_schema

    tool = in_process(failures=0.5, seed=0)
    assert get_json_schema(tool) == SCHEMA
    said = [tool("print(40 + 2)") for _ in range(400)]
    assert 0.4 < sum(text in FAILURES for text in said) / 400 < 0.6
    assert set(said) - set(FAILURES) == {"42"}
    assert {text.format(name="python") for text in TRANSIENT_ERRORS} == set(FAILURES)


@pytest.mark.parametrize(
    ("code", "shown"),
    [
        ("print(12 + 34)", "46"),
        ("print(-3 * (2 - 9))", "21"),
        ("12 + 34", "(no output)"),
        ("print(1 / 0)", "ZeroDivisionError: division by zero"),
        ("print(12 +", "SyntaxError: invalid syntax"),
        ("print(x)", "NameError: name 'x' is not defined"),
    ],
)
def test_trls_tool_prints_what_python_prints(code: str, shown: str) -> None:
    assert computed(code) == shown


@pytest.mark.parametrize(
    "code",
    [
        "import os",
        "print.__self__",
        "open('x')",
        "().__class__",
        "[0] * 9",
        "2 ** 999999999",
        "print('x' * 9)",
        "x = 1",
    ],
)
def test_trls_tool_runs_nothing_but_sums(code: str) -> None:
    assert computed(code).startswith("NameError")


def test_a_runs_clock_starts_with_its_first_rollout() -> None:
    def line(time_s: float, reward: float) -> dict[str, float]:
        return {
            "time_s": time_s,
            "reward/component/outcome": reward,
            "time/rollout_s": 3.0,
            "time/learn_s": 1.5,
            "time/publish_s": 0.5,
        }

    assert trl.points_of([line(30.0, 0.25), line(32.0, 0.5)]) == [(5.0, 0.25), (7.0, 0.5)]


def test_a_runs_row_compares_it_with_trl() -> None:
    rewards = [0.3, 0.5, 0.6, 0.7, 0.7, 0.8, 0.9, 0.85]
    ours = [trl.Point(10.0 + index, reward) for index, reward in enumerate(rewards)]
    peer = [trl.Point(20.0 + 4 * index, 0.5) for index in range(8)]
    found = trl.row("ours", ours, peer)
    assert found["trajectories/s"] == pytest.approx(128)
    assert found["times TRL"] == pytest.approx(4)
    assert found["s to 0.7"] == 16.0  # five batches up to 0.9 have a mean of 0.74; up to 0.8, one of 0.66
    assert found["highest reward"] == pytest.approx(np.mean(rewards[-5:])) == found["last reward"]
    assert trl.row("TRL", peer, peer)["s to 0.7"] is None


def test_one_lucky_batch_is_not_the_goal() -> None:
    assert trl.time_to([trl.Point(float(index), 1.0) for index in range(4)], 0.7) is None
    assert trl.time_to([trl.Point(float(index), 1.0) for index in range(5)], 0.7) == 4.0
