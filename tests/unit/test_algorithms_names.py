"""Every algorithm is found by its name, with the signature that a caller from outside relies on."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from toolrl import registered_names
from toolrl.algorithms import advantages, corrections, policy_losses, registries, regularizers

NAMES = {
    "advantage": ("grpo", "dr_grpo", "rloo", "gtpo", "steppo", "gear", "lambda_return"),
    "policy loss": ("token", "gspo", "cispo", "ctpo", "cppo", "steppo"),
    "correction": ("tis", "icepop", "mis", "decoupled"),
    "regulariser": ("kl", "entropy", "llds", "sft"),
}
REGISTRIES = {
    "advantage": (registries.advantage_registry, advantages),
    "policy loss": (registries.policy_loss_registry, policy_losses),
    "correction": (registries.correction_registry, corrections),
    "regulariser": (registries.regularizer_registry, regularizers),
}


@pytest.mark.parametrize("kind", NAMES)
def test_each_algorithm_is_registered_public_and_known_without_torch(kind):
    registry, module = REGISTRIES[kind]
    assert set(NAMES[kind]) == set(registry.names()) == registered_names.registered(kind)
    assert all(callable(getattr(module, name)) and name in module.__all__ for name in NAMES[kind])


@pytest.mark.parametrize("kind", NAMES)
def test_options_that_a_config_may_name_are_those_of_the_function(kind):
    registry, _ = REGISTRIES[kind]
    filled = {"rollout_logp", "turn_ids", "loss_mask"}  # by the learner
    for name in NAMES[kind]:
        parameters = inspect.signature(registry.get(name)).parameters.values()
        expected = {p.name for p in parameters if p.default is not p.empty} - filled
        assert registered_names.options(kind, name) == (expected, frozenset())


def test_what_an_advantage_needs_is_known_without_importing_it():
    for name, function in ((name, registries.advantage_registry.get(name)) for name in NAMES["advantage"]):
        assert registered_names.evidence(name) == registries.needed_evidence(function)
    assert registered_names.evidence("steppo") == registered_names.evidence("lambda_return") == "values"
    assert registered_names.evidence("gear") == "teacher" and registered_names.evidence("my.module:mine") is None
    assert registries.is_per_token(registries.advantage_registry.get("gear"))
    assert not registries.is_per_token(registries.advantage_registry.get("steppo"))


@pytest.mark.parametrize("name", NAMES["policy loss"])
def test_a_policy_loss_has_the_published_signature(name):
    parameters = list(inspect.signature(getattr(policy_losses, name)).parameters.values())
    assert [p.name for p in parameters[:5]] == ["logp", "old_logp", "advantages", "policy_mask", "loss_mask"]
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters[:5])
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters[5:])
    assert parameters[4].default is None and parameters[5].name == "rollout_logp" and parameters[5].default is None


def test_the_page_names_every_algorithm_and_every_option():
    page = (Path(__file__).parents[2] / "docs" / "algorithms.md").read_text()
    for kind, names in NAMES.items():
        for name in names:
            taken, _ = registered_names.options(kind, name) or (frozenset(), frozenset())
            missing = [word for word in (name, *taken) if f"`{word}`" not in page]
            assert not missing, f"{kind} {name}"
