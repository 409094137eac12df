"""The settings of guards: presets that name what exists, mistakes that are refused with the key and the remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from toolrl import config_checks, presets, registered_names
from toolrl.config import GuardRuleConfig, Named, RunConfig
from toolrl.errors import ConfigError
from toolrl.guards import Guards
from toolrl.guards import presets as guard_presets
from toolrl.guards.rule import CONDITIONS
from toolrl.monitors.known_metrics import known
from toolrl.rewards import rewards
from toolrl.rewards.component import stage_of

OF_RULES = "guards.rules.0"


def problems_of(config: RunConfig) -> dict[str, str]:
    return {p.key: p.message for p in config_checks.problems(config) if p.key.startswith("guards")}


def with_rule(**changed: Any) -> dict[str, str]:
    config = presets.load("quickstart-cpu")
    rule = {"name": "mine", "metric": "tool/call_rate", "condition": "below", "threshold": 0.1, **changed}
    config.guards.rules = [GuardRuleConfig(**rule)]
    return problems_of(config)


@pytest.mark.parametrize("preset", guard_presets.names())
def test_a_preset_names_metrics_and_actions_that_exist(preset: str) -> None:
    config = presets.load("quickstart-cpu")
    config.rewards.components.append(Named("interaction"))
    config.guards.rules = guard_presets.preset_rules(preset)
    assert problems_of(config) == {}
    assert all(known(rule.metric) for rule in config.guards.rules)
    assert len(guard_presets.description(preset)) > 20


@pytest.mark.parametrize("preset", guard_presets.names())
def test_a_preset_becomes_the_guards_of_a_run(preset: str) -> None:
    config = presets.load("quickstart-cpu", [f"guards.preset={preset}"])
    rules = guard_presets.rules(config)
    assert Guards(rules).observe(1, {}) == []
    if preset == "watch":
        assert {rule.action.name for rule in rules} == {"tell"}


def test_the_standard_presets_know_every_kind_of_collapse() -> None:
    for preset in guard_presets.names():
        watched = {rule.metric for rule in guard_presets.preset_rules(preset)}
        assert watched >= {"tool/call_rate", "displacement/mean", "format/polluted", "format/collapsed"}
        assert "control/mass_outside" in watched


def test_the_page_about_collapse_names_every_rule_and_action() -> None:
    page = (Path(__file__).parents[2] / "docs" / "collapse.md").read_text()
    rules = {rule.name for preset in guard_presets.names() for rule in guard_presets.preset_rules(preset)}
    rules -= {name for name in rules if name.startswith("refuse_")}  # told in a sentence
    named = rules | registered_names.registered("guard action") | set(CONDITIONS)
    assert {name for name in named if f"`{name}`" not in page} == set()


def test_a_rule_of_a_preset_rules_name_replaces_it() -> None:
    own = "{name: polluted_turns, metric: format/polluted, condition: above, threshold: 0.5}"
    config = presets.load("quickstart-cpu", ["guards.preset=standard", f"guards.rules=[{own}]"])
    (found,) = [rule for rule in guard_presets.rules(config) if rule.name == "polluted_turns"]
    assert (found.threshold, found.action.name) == (0.5, "tell")


def test_a_preset_rule_that_cannot_act_is_left_out_with_a_warning() -> None:
    config, warnings = presets.load_with_warnings(
        "quickstart-cpu", ["guards.preset=standard", "learner.updates_per_batch=1"]
    )
    assert "likelihood_sinks" not in {rule.name for rule in guard_presets.rules(config)}
    assert any("likelihood_sinks is left out" in str(each) for each in warnings)


@pytest.mark.parametrize(
    ("changed", "key", "message"),
    [
        ({"metric": "tool/call_rat"}, "metric", "did you mean 'tool/call_rate'?"),
        ({"metric": ""}, "metric", "watches one metric"),
        ({"name": "a/b"}, "name", "names a metric"),
        ({"action": Named("lower_lrr")}, "action.name", "did you mean 'lower_lr'?"),
        ({"action": Named("lower_lr", {"factr": 0.5})}, "action.options.factr", "did you mean 'factor'?"),
        ({"action": Named("lower_lr", {"factor": 1.5})}, "action.options.factor", "above 0 and below 1"),
        ({"action": Named("interaction_weight")}, "action.options.component", "add interaction to rewards.components"),
        ({"action": Named("reject_batch"), "metric": "grad/norm"}, "metric", "not known before the batch is trained"),
        ({"floor": 0.1}, "floor", "only above_ema"),
        ({"condition": "drop_from_peak", "threshold": -0.1}, "threshold", "above 0"),
        ({"condition": "above_ema", "threshold": 0.9}, "threshold", "above 1"),
        ({"release": 0.05}, "release", "at least the threshold"),
        ({"condition": "above", "release": 0.2}, "release", "at most the threshold"),
        ({"window": 0}, "window", "at least 1"),
        ({"follow_up_steps": 0}, "follow_up_steps", "at least 1"),
        ({"threshold": float("nan")}, "threshold", "finite"),
    ],
)
def test_a_mistake_is_refused_with_its_key_and_the_remedy(changed: dict[str, Any], key: str, message: str) -> None:
    found = with_rule(**changed)
    assert list(found) == [f"{OF_RULES}.{key}"]
    assert message in found[f"{OF_RULES}.{key}"]


def test_actions_ask_for_what_they_need() -> None:
    config = presets.load("quickstart-cpu")
    config.learner.updates_per_batch, config.loop.checkpoint_every_steps = 1, 0
    rule = {"metric": "tool/call_rate", "threshold": 0.1}
    config.guards.rules = [GuardRuleConfig(name=name, action=Named(name), **rule) for name in ("llds", "roll_back")]
    found = problems_of(config)
    assert "updates_per_batch" in found["guards.rules.0.action.name"]
    assert "checkpoint_every_steps" in found["guards.rules.1.action.name"]


def test_only_the_weight_of_a_group_reward_can_be_raised() -> None:
    config = presets.load("quickstart-cpu")
    config.rewards.components.append(Named("interaction"))
    for component, is_refused in (("interaction", False), ("format", True)):
        action = Named("interaction_weight", {"component": component})
        config.guards.rules = [GuardRuleConfig(name="mine", metric="tool/call_rate", threshold=0.1, action=action)]
        assert bool(problems_of(config)) is is_refused


def test_when_a_reward_is_scored_is_read_as_the_registry_has_it() -> None:
    assert {name: registered_names.stage(name) for name in rewards} == {n: stage_of(rewards.get(n)) for n in rewards}


def test_an_unknown_preset_is_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'standard'"):
        presets.load("quickstart-cpu", ["guards.preset=standrad"])


def test_two_rules_of_one_name_are_refused() -> None:
    config = presets.load("quickstart-cpu")
    config.guards.rules = [GuardRuleConfig(name="mine", metric="tool/call_rate") for _ in range(2)]
    assert "share this name" in problems_of(config)["guards.rules"]


def test_guards_are_read_without_torch() -> None:
    code = "import sys, toolrl.guards.presets, toolrl.config_checks; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
