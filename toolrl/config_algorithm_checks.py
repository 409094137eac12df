"""Combinations of algorithms: those that cannot work are refused with the reason, odd ones get a warning.

Anything else that can be named is allowed. docs/algorithms.md lists the same under "Combinations". Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from toolrl import registered_names
from toolrl.config import Named, RunConfig
from toolrl.errors import Problem, UserError
from toolrl.guards.actions import needs_reference
from toolrl.guards.presets import rules

GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "gtpo", "gear")
# Their ratio is against the engine's distribution itself, so the gap to the trainer is inside it.
_AGAINST_ENGINE = ("cppo",)
# At ratio 1 they are the plain policy gradient, whatever their options.
_ACTS_BY_RATIO = ("ctpo", "gspo", "steppo")
_NEVER_NEGATIVE = ("kl", "llds", "sft")


def groups(config: RunConfig) -> Iterator[Problem]:
    advantage, size = config.algorithm.advantage.name, config.loop.group_size
    if size < 2 and advantage in GROUP_ADVANTAGES:
        message = f"{advantage} compares the samples of a group and gives a group of one no advantage; at least 2"
        yield Problem("loop.group_size", message, size)


def one_update(config: RunConfig) -> Iterator[Problem]:
    """Old log-probabilities are those of the weights at a batch's first update, also for stale data."""
    if config.learner.updates_per_batch > 1:
        return
    loss = config.algorithm.policy_loss.name
    if any(part.name == "llds" for part in config.algorithm.regularizers):
        message = (
            "llds holds what became less likely since the batch's first update, so with one update it is always 0; "
            "set 2 (its authors) or more, or remove llds from algorithm.regularizers"
        )
        yield Problem("learner.updates_per_batch", message, 1)
    if loss in _ACTS_BY_RATIO:
        message = f"with one update a batch the ratio of {loss} is always 1 and nothing is clipped; set 2 or more"
        yield Problem("learner.updates_per_batch", message, 1, warning=True)


def corrected_twice(config: RunConfig) -> Iterator[Problem]:
    loss, correction = config.algorithm.policy_loss.name, config.algorithm.correction
    if loss in _AGAINST_ENGINE and correction is not None:
        message = (
            f"the ratio of {loss} is against the engine's own log-probabilities, which {correction.name} would correct "
            "a second time; set algorithm.correction=null"
        )
        yield Problem("algorithm.correction.name", message, correction.name)


def geometric_mean(config: RunConfig) -> Iterator[Problem]:
    correction = config.algorithm.correction
    if correction is None or correction.name != "mis" or not correction.options.get("geometric"):
        return
    if correction.options.get("level", "sequence") != "sequence":
        message = "a geometric mean is of a sequence; set sequence, or geometric=false"
        yield Problem("algorithm.correction.options.level", message, correction.options["level"])


def aggregations(config: RunConfig) -> Iterator[Problem]:
    a = config.algorithm
    if a.policy_loss.name == "gspo" and a.aggregation != "seq_mean_token_mean":
        message = "gspo has one ratio a sequence and averages over sequences; its paper's is seq_mean_token_mean"
        yield Problem("algorithm.aggregation", message, a.aggregation, warning=True)
    if a.advantage.name == "dr_grpo" and a.aggregation != "seq_mean_token_sum_norm":
        message = (
            "dr_grpo takes the lengths out of the loss, which this puts in again; its paper's is "
            "seq_mean_token_sum_norm"
        )
        yield Problem("algorithm.aggregation", message, a.aggregation, warning=True)


def regularizers(config: RunConfig) -> Iterator[Problem]:
    named = config.algorithm.regularizers
    for index, part in enumerate(named):
        key = f"algorithm.regularizers.{index}"
        if part.name in [before.name for before in named[:index]]:
            yield Problem(f"{key}.name", "this regulariser is listed twice; use its weight", part.name)
        weight = part.options.get("weight")
        if part.name in _NEVER_NEGATIVE and isinstance(weight, int | float) and weight < 0:
            message = f"a negative weight rewards what {part.name} is to hold down; set 0 or more"
            yield Problem(f"{key}.options.weight", message, weight)
        if part.name == "kl":
            yield from _kl(key, part)
        if part.name == "llds" and part.options.get("mask_answer") and not config.tools:
            message = "weighs the answer by the calls of a trajectory: without tools it would weigh 0; set false"
            yield Problem(f"{key}.options.mask_answer", message, True)
    if config.learner.offload_reference and not _keeps_reference(config):
        message = (
            "nothing needs a reference model: add kl to algorithm.regularizers or a guard that acts by it, or set false"
        )
        yield Problem("learner.offload_reference", message, True)


def _keeps_reference(config: RunConfig) -> bool:
    if any(part.name == "kl" for part in config.algorithm.regularizers):
        return True
    try:
        return needs_reference(rule.action.name for rule in rules(config))
    except UserError:  # guards that cannot be read are told of by their own check
        return True


def _kl(key: str, part: Named) -> Iterator[Problem]:
    if part.options.get("estimator") == "k1" and part.options.get("place", "loss") == "loss":
        message = "the gradient of k1 in the loss is 0 on average and holds nothing; set k3 or k2, or place=reward"
        yield Problem(f"{key}.options.estimator", message, "k1", warning=True)


def out_of_the_loss(config: RunConfig) -> Iterator[Problem]:
    a = config.algorithm
    if a.void_turns != "train" and not config.tools:
        message = "without tools a void turn is an answer that is none: what failed would teach nothing; set train"
        yield Problem("algorithm.void_turns", message, a.void_turns)
    if a.truncated == "mask" and any(part.name == "overlong" for part in config.rewards.components):
        message = (
            "overlong punishes what is cut off, and this takes it out of the loss: the penalty reaches only the group's "
            "baseline; set train, or remove the reward"
        )
        yield Problem("algorithm.truncated", message, a.truncated, warning=True)


def overlong(config: RunConfig) -> Iterator[Problem]:
    for index, part in enumerate(config.rewards.components):
        longest, ramp = part.options.get("max_tokens"), part.options.get("ramp_tokens")
        if part.name != "overlong" or not isinstance(longest, int):
            continue
        key, limit = f"rewards.components.{index}.options", config.rollout.max_response_tokens
        ramp = longest // 5 if ramp is None else ramp
        if ramp > longest:
            message = f"is more than max_tokens={longest}: every trajectory would be punished; set a fifth of that"
            yield Problem(f"{key}.ramp_tokens", message, ramp)
        elif longest - ramp >= limit:
            message = (
                f"the penalty begins at max_tokens − ramp_tokens = {longest - ramp} sampled tokens, and "
                f"rollout.max_response_tokens={limit} lets none come so far; set ${{rollout.max_response_tokens}}"
            )
            yield Problem(f"{key}.max_tokens", message, longest)


def spread(config: RunConfig) -> Iterator[Problem]:
    advantage = config.algorithm.advantage.name
    if config.buffer.drop_uniform_groups and registered_names.evidence(advantage) == "values":
        message = f"{advantage} judges each trajectory by the critic: groups without spread teach too; set false"
        yield Problem("buffer.drop_uniform_groups", message, True, warning=True)


CHECKS: list[Callable[[RunConfig], Iterator[Problem]]] = [
    groups,
    one_update,
    corrected_twice,
    geometric_mean,
    aggregations,
    regularizers,
    out_of_the_loss,
    overlong,
    spread,
]
