"""Combinations of rewards that cannot work, or pay for what nobody wants. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from toolrl.config import RunConfig
from toolrl.config_algorithm_checks import GROUP_ADVANTAGES
from toolrl.errors import Problem

_COMPARE_A_GROUP = ("code_similarity", "interaction")


def group_rewards(config: RunConfig) -> Iterator[Problem]:
    """They know by another reward who was right."""
    known = [*(part.name.rpartition(":")[2] for part in config.rewards.components), *config.rewards.late.names]
    for index, part in enumerate(config.rewards.components):
        if part.name not in _COMPARE_A_GROUP:
            continue
        key = f"rewards.components.{index}"
        reward = str(part.options.get("outcome_reward", "outcome"))
        if reward not in known:
            message = (
                f"{part.name} knows by this reward who was right, and it is not among rewards.components "
                f"({', '.join(known)}); name another"
            )
            yield Problem(f"{key}.options.outcome_reward", message, reward)
        elif config.rewards.weights.get(reward, 1.0) == 0:
            message = (
                f"{part.name} knows by {reward} who was right, and with the weight 0 nothing is recorded; set another"
            )
            yield Problem(f"rewards.weights.{reward}", message, 0.0)
        if part.name == "interaction" and not config.tools:
            yield Problem(f"{key}.name", "rewards calls, and there are no tools; remove it", part.name)


def group_size(config: RunConfig) -> Iterator[Problem]:
    """An advantage that compares a group says the same of itself."""
    comparing = [part.name for part in config.rewards.components if part.name in _COMPARE_A_GROUP]
    if comparing and config.loop.group_size < 2 and config.algorithm.advantage.name not in GROUP_ADVANTAGES:
        message = f"the reward {comparing[0]} compares the samples of a group; at least 2"
        yield Problem("loop.group_size", message, config.loop.group_size)


def price_of_calls(config: RunConfig) -> Iterator[Problem]:
    """With all its calls a right answer must be worth more than silence, or calls are trained away."""
    weights, calls = config.rewards.weights, config.rollout.max_calls
    for index, part in enumerate(config.rewards.components):
        cost, most = part.options.get("cost", 0.1), part.options.get("most")
        if part.name != "call_cost" or not isinstance(cost, int | float):
            continue
        price = weights.get("call_cost", 1.0) * min(cost * calls, float("inf") if most is None else most)
        right = weights.get("outcome", 1.0)
        if price >= right > 0:
            message = (
                f"rollout.max_calls={calls} calls cost {price:g} and a right answer is worth {right:g}: it may be better to "
                "answer wrong and not to call; bound the price with the option most"
            )
            yield Problem(f"rewards.components.{index}.options.cost", message, cost, warning=True)


def broken_calls(config: RunConfig) -> Iterator[Problem]:
    names = [part.name for part in config.rewards.components]
    if "format" in names and "parse_failure" in names:
        message = "punishes a call that does not parse a second time, after format; take one of them"
        index = names.index("parse_failure")
        yield Problem(f"rewards.components.{index}.name", message, "parse_failure", warning=True)


CHECKS: list[Callable[[RunConfig], Iterator[Problem]]] = [group_rewards, group_size, price_of_calls, broken_calls]
