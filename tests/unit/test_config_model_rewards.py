"""Rewards that need a model: impossible settings are refused before anything starts, and the defaults are the functions' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from actors.replay import ReplaySettings
from toolrl import placement
from toolrl.config import Named, RunConfig
from toolrl.config_checks import problems
from toolrl.config_model_rewards import options_in_effect
from toolrl.rewards.monte_carlo import MonteCarloOptions
from toolrl.rewards.prm import PrmOptions


def config(name: str, **options: Any) -> RunConfig:
    made = RunConfig()
    made.tasks.families = []
    made.rewards.components = [Named("outcome"), Named(name, options)]
    return made


def told(made: RunConfig, *, warnings: bool = False) -> list[str]:
    found = problems(made)
    return [f"{each.key}: {each.message}" for each in found if each.warning == warnings and "tasks" not in each.key]


@pytest.mark.parametrize(
    ("name", "options", "key", "said"),
    [
        ("monte_carlo", {"share": 0}, "share", "above 0 and at most 1"),
        ("monte_carlo", {"share": 1.5}, "share", "above 0 and at most 1"),
        ("monte_carlo", {"continuations": 2.5}, "continuations", "a whole number"),
        ("monte_carlo", {"boundaries": 0}, "boundaries", "at least 1"),
        ("monte_carlo", {"concurrency": True}, "concurrency", "a whole number"),
        ("monte_carlo", {"choose": "evn"}, "choose", "must be one of even, uncertain"),
        ("monte_carlo", {"continuation": 2}, "continuation", "no such option"),
        ("prm", {}, "model", "needs this option"),
        ("prm", {"model": "/nowhere"}, "model", "no folder in Hugging Face format"),
        ("prm", {"model": "a.b:c", "aggregate": "max"}, "aggregate", "must be one of last, mean, min, product"),
        ("prm", {"model": "a.b:c", "gpus": 0}, "gpus", "above 0"),
        ("masked_result", {"full_nats": 0}, "full_nats", "above 0"),
        ("attention_mass", {"layer": 0.5}, "layer", "a whole number"),
    ],
)
def test_wrong_options_are_refused_by_name(name: str, options: dict[str, Any], key: str, said: str) -> None:
    found = told(config(name, **options))
    assert any(line.startswith(f"rewards.components.1.options.{key}:") and said in line for line in found), found


@pytest.mark.parametrize("name", ["monte_carlo", "masked_result", "attention_mass"])
def test_without_calls_there_is_nothing_to_look_at(name: str) -> None:
    assert told(config(name)) == []
    made = config(name)
    made.rollout.max_calls = 0
    assert any("no tool can be called" in line for line in told(made))


def test_combinations_that_cannot_work(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    made = config("prm", model=str(tmp_path), device="cuda")
    assert told(made) == []
    made.placement.device, made.model.dtype = "cpu", "float32"
    assert any("set cpu here too" in line for line in told(made))
    assert any("drop_uniform_groups=false keeps them" in line for line in told(config("masked_result"), warnings=True))
    made = config("monte_carlo")
    made.rewards.late.deadline_s = made.loop.batch_deadline_s
    assert any("batch_deadline_s / 2" in line for line in told(made, warnings=True))


def test_options_in_effect_are_the_configs_over_the_functions_own() -> None:
    found = options_in_effect(config("monte_carlo", share=0.5).rewards, "monte_carlo")
    assert found is not None
    assert MonteCarloOptions(**found) == MonteCarloOptions(0.5, 4, 4, "even", 16, "last", "turn")
    assert options_in_effect(config("monte_carlo").rewards, "prm") is None


def test_reward_workers_have_a_place_of_their_own() -> None:
    made = config("prm", model="a.b:c", workers=2, cpu_threads=3)
    found = options_in_effect(made.rewards, "prm")
    assert found is not None and PrmOptions(**found).batch_size == 8
    plain = placement.needed(config("format"), "cpu").total()
    assert placement.needed(made, "cpu").total()["CPU"] == plain["CPU"] + 6
    made = config("prm", model="a.b:c", device="cuda", gpus=0.5)
    for mode, gpus in (("disaggregated", 2.5), ("colocated", 1.5)):
        made.placement.mode = mode  # type: ignore[assignment]
        assert placement.needed(made, "cuda").total()["GPU"] == gpus


@pytest.mark.parametrize(
    ("reward", "advantage", "options", "credits"),
    [
        ("monte_carlo", "gtpo", {}, True),
        ("monte_carlo", "gtpo", {"normalize": "first_return"}, False),
        ("monte_carlo", "grpo", {}, False),
        ("format", "gtpo", {}, False),
    ],
)
def test_turns_are_credited_where_the_advantage_gives_each_its_own(
    reward: str, advantage: str, options: dict[str, Any], credits: bool
) -> None:
    made = config(reward)
    made.algorithm.advantage = Named(advantage, options)
    assert ReplaySettings.of(made).turn_credit is credits
    made.rewards.components[1].options["per"] = "trajectory"
    assert reward == "format" or not ReplaySettings.of(made).turn_credit
