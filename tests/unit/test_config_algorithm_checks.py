"""Combinations of algorithms: every refusal and every warning, by its key and with its remedy; what makes sense passes."""

from __future__ import annotations

import importlib
import inspect
import itertools
import json
import typing

import pytest

from toolrl import config_checks, presets, registered_names
from toolrl.config import Named, RunConfig
from toolrl.errors import ConfigError

LLDS = "algorithm.regularizers=[{name: llds, options: {weight: 0.2}}]"
KL = "algorithm.regularizers=[{{name: kl, options: {{weight: 0.1, {}}}}}]"


def loss(name: str, **options: object) -> str:
    return f"algorithm.policy_loss={{name: {name}, options: {json.dumps(options)}}}"


def correction(name: str, **options: object) -> str:
    return f"algorithm.correction={{name: {name}, options: {json.dumps(options)}}}"


REFUSED = [
    (["loop.group_size=1"], "loop.group_size", "gtpo compares the samples of a group"),
    (["loop.group_size=1", "algorithm.advantage=rloo"], "loop.group_size", "rloo compares the samples"),
    ([LLDS, "learner.updates_per_batch=1"], "learner.updates_per_batch", "llds holds .* always 0; set 2"),
    ([loss("cppo")], "algorithm.correction.name", "tis would correct a second time; set algorithm.correction=null"),
    ([loss("cppo"), correction("decoupled")], "algorithm.correction.name", "decoupled would correct a second time"),
    (
        [correction("mis", geometric=True, level="token")],
        "algorithm.correction.options.level",
        "a geometric mean is of a sequence; set sequence",
    ),
    ([correction("mis", low=1.1)], "algorithm.correction.options.low", "bounds that exclude 1"),
    ([correction("mis", high=0.99)], "algorithm.correction.options.high", "bounds that exclude 1"),
    ([correction("icepop", low=1.5, high=5)], "algorithm.correction.options.low", "0 to 1: bounds that exclude 1"),
    ([correction("tis", cap=0.5)], "algorithm.correction.options.cap", "at least 1: .* the weight is 1"),
    ([correction("tis", level="seq")], "algorithm.correction.options.level", "one of token, sequence"),
    ([correction("decoupled", above_cap="cut")], "algorithm.correction.options.above_cap", "truncate, drop"),
    (["algorithm.advantage=steppo"], "critic.kind", "reads the value of every turn: set shared"),
    (["algorithm.advantage=lambda_return"], "critic.kind", "reads the value of every turn"),
    (["critic.kind=own"], "critic.kind", "gtpo reads no values"),
    (
        ["rewards.late.bootstrap=true", "algorithm.advantage=steppo", "critic.kind=own"],
        "rewards.late.bootstrap",
        "steppo takes a missing reward for 0; set algorithm.advantage=lambda_return",
    ),
    (
        [
            "rewards.late.bootstrap=true",
            "algorithm.advantage=lambda_return",
            "critic.kind=own",
            "buffer.drop_uniform_groups=true",
        ],
        "buffer.drop_uniform_groups",
        "some are not there yet",
    ),
    (["algorithm.advantage.options.normalize=poold"], "algorithm.advantage.options.normalize", "mean 'pooled'"),
    (["algorithm.advantage.options.gamma=1.5"], "algorithm.advantage.options.gamma", "0 to 1"),
    ([loss("token", clip_low=1.0)], "algorithm.policy_loss.options.clip_low", "0 to below 1"),
    ([loss("gspo", clip_low=-0.1)], "algorithm.policy_loss.options.clip_low", "0 to below 1"),
    ([loss("token", dual_clip=1.0)], "algorithm.policy_loss.options.dual_clip", "above 1"),
    ([loss("token", clip_high="wide")], "algorithm.policy_loss.options.clip_high", "must be a number"),
    ([loss("ctpo", space="lin")], "algorithm.policy_loss.options.space", "one of log, ratio"),
    (["algorithm.policy_loss.options.power=.inf"], "algorithm.policy_loss.options.power", "finite"),
    ([loss("cppo", w_min=2), "algorithm.correction=null"], "algorithm.policy_loss.options.w_min", "0 to 1"),
    ([KL.format("estimator: k4")], "algorithm.regularizers.0.options.estimator", "one of k1, k2, k3"),
    (
        [KL.format("place: loss"), "algorithm.regularizers.1={name: kl, options: {weight: 1}}"],
        "algorithm.regularizers.1.name",
        "listed twice",
    ),
    (["algorithm.regularizers=[{name: kl, options: {weight: -0.1}}]"], "algorithm.regularizers.0.options.weight", "negative"),
    (["algorithm.regularizers=[{name: llds, options: {weight: .nan}}]"], "algorithm.regularizers.0.options.weight", "finite"),
    (
        ["algorithm.regularizers=[{name: llds, options: {weight: 0.2, mask_answer: true}}]", "tools=[]"],
        "algorithm.regularizers.0.options.mask_answer",
        "without tools it would weigh 0",
    ),
    (["learner.offload_reference=true"], "learner.offload_reference", "nothing needs a reference model: add kl"),
    (["algorithm.void_turns=mask", "tools=[]"], "algorithm.void_turns", "what failed would teach nothing"),
    (["algorithm.void_turns=drop"], "algorithm.void_turns", "train, mask, drop_trajectory"),
    (["algorithm.truncated=drop"], "algorithm.truncated", "train, mask"),
    (
        ["rewards.components.2={name: overlong, options: {max_tokens: 100, ramp_tokens: 200}}"],
        "rewards.components.2.options.ramp_tokens",
        "every trajectory would be punished",
    ),
    (
        ["rewards.components.2={name: overlong, options: {max_tokens: 1000}}"],
        "rewards.components.2.options.max_tokens",
        "begins at max_tokens − ramp_tokens = 800 .* set .*rollout.max_response_tokens",
    ),
    (
        ["rewards.components.2={name: overlong, options: {max_tokens: 300, ramp_tokens: -1}}"],
        "rewards.components.2.options.ramp_tokens",
        "0 .a step. or more",
    ),
    (["buffer.max_refills=0"], "buffer.max_refills", "buffer.drop_uniform_groups=false keeps every group"),
]  # fmt: skip

WARNED = [
    ([loss("gspo")], "algorithm.aggregation", "seq_mean_token_mean"),
    (["algorithm.advantage=dr_grpo"], "algorithm.aggregation", "seq_mean_token_sum_norm"),
    (["learner.updates_per_batch=1"], "learner.updates_per_batch", "the ratio of ctpo is always 1"),
    (["learner.updates_per_batch=1", "buffer.max_staleness=0"], "learner.updates_per_batch", "always 1"),
    ([KL.format("estimator: k1")], "algorithm.regularizers.0.options.estimator", "0 on average"),
    (
        ["algorithm.truncated=mask", "rewards.components.2={name: overlong, options: {max_tokens: 320}}"],
        "algorithm.truncated",
        "only the group's baseline",
    ),
    (
        ["algorithm.advantage=steppo", "critic.kind=own", "buffer.drop_uniform_groups=true"],
        "buffer.drop_uniform_groups",
        "groups without spread teach too",
    ),
]


@pytest.mark.parametrize(("overrides", "key", "told"), REFUSED, ids=[f"{key} {told}" for _, key, told in REFUSED])
def test_what_cannot_work_is_refused_with_the_key_and_the_remedy(overrides: list[str], key: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        presets.load("quickstart-cpu", ["rollout.max_response_tokens=320", *overrides])
    assert [problem.key for problem in caught.value.problems] == [key]


@pytest.mark.parametrize(("overrides", "key", "told"), WARNED, ids=[f"{key} {told}" for _, key, told in WARNED])
def test_what_is_odd_runs_with_a_warning(overrides: list[str], key: str, told: str) -> None:
    _, warnings = presets.load_with_warnings("quickstart-cpu", ["rollout.max_response_tokens=320", *overrides])
    assert [warning.key for warning in warnings] == [key]
    assert told in warnings[0].message


@pytest.mark.parametrize(
    "overrides",
    [
        [KL.format("estimator: k1, place: reward")],
        [loss("ctpo", space="ratio", clip_low=0.2, clip_high=0.2, dual_clip=False)],
        [loss("ctpo", clip_low=1.5, power=-0.5)],
        [loss("cispo", clip_low=None)],
        [loss("cppo"), "algorithm.correction=null"],
        [correction("mis", geometric=True, low=0.99, high=1.01)],
        ["algorithm.void_turns=drop_trajectory", "algorithm.truncated=mask"],
        ["algorithm.regularizers=[{name: entropy, options: {weight: -0.01}}]"],
        ["rewards.weights.outcome=2"],
    ],
)
def test_what_makes_sense_passes_without_a_warning(overrides: list[str]) -> None:
    assert presets.load_with_warnings("quickstart-cpu", overrides)[1] == []


def test_every_advantage_goes_with_every_loss_and_correction_but_those_that_the_table_names() -> None:
    """Any combination that makes sense is allowed; the exceptions are those of docs/algorithms.md."""
    config: RunConfig = presets.load("quickstart-cpu")
    kinds = [sorted(registered_names.registered(kind)) for kind in ("advantage", "policy loss", "correction")]
    for advantage, policy_loss, corrected in itertools.product(*kinds):
        config.algorithm.advantage, config.algorithm.policy_loss = Named(advantage), Named(policy_loss)
        config.algorithm.correction = Named(corrected)
        config.critic.kind = "own" if registered_names.evidence(advantage) == "values" else "none"
        refused = [problem.key for problem in config_checks.problems(config) if not problem.warning]
        assert refused == (["algorithm.correction.name"] if policy_loss == "cppo" else [])


@pytest.mark.parametrize("kind", ["advantage", "policy loss", "correction", "regulariser"])
def test_the_words_of_an_option_read_from_the_sources_are_those_of_its_annotation(kind: str) -> None:
    registries = importlib.import_module("toolrl.algorithms.registries")
    importlib.import_module("toolrl.algorithms")
    registry = {
        "advantage": registries.advantage_registry,
        "policy loss": registries.policy_loss_registry,
        "correction": registries.correction_registry,
        "regulariser": registries.regularizer_registry,
    }[kind]
    for name in registry.names():
        function = registry.get(name)
        hints = typing.get_type_hints(function)
        expected = {
            option: typing.get_args(hints[option])
            for option in inspect.signature(function).parameters
            if typing.get_origin(hints[option]) is typing.Literal
        }
        assert registered_names.choices(kind, name) == expected, name


def test_a_guard_that_acts_by_kl_keeps_a_reference_too() -> None:
    presets.load("quickstart-cpu", ["learner.offload_reference=true", "guards.preset=standard"])
    with pytest.raises(ConfigError, match="nothing needs a reference model"):
        presets.load("quickstart-cpu", ["learner.offload_reference=true", "guards.preset=watch"])
