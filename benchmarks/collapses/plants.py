"""What makes a small run collapse: hands put between its steps, a little harder at each.

A plant works on what the run itself works with (the sequences that the learner gets, or the learner's weights), so that
what the monitors measure afterwards is measured of a policy that really is so.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.collapses.laboratory import Laboratory
from learner.sequence import TrainSequence, sequences_from
from toolrl.trajectory import Trajectory

OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Plant:
    """One way to die. `age` counts the steps since it was planted, from 1; `strength` is about 1."""

    kind: str
    own_rules: tuple[str, ...]  # of the presets' rules those that are made for it
    # The sequences of a batch -> what is learnt from instead; and what is done to the weights after the batch.
    before: Callable[[Laboratory, list[list[Trajectory]], list[TrainSequence], float], list[TrainSequence]] | None = (
        None
    )
    after: Callable[[Laboratory, list[list[Trajectory]], int, float, int], None] | None = None


def avoid_calls(lab: Laboratory, groups: list[list[Trajectory]], age: int, strength: float, seed: int) -> None:
    """Supervised steps on traces that answer without a call, as many as the policy writes: it learns to guess."""
    guesses = [trace for trace in lab.traces if trace.metadata.get("kind") == "direct"]
    drawn = random.Random(f"{seed}/{age}").sample(guesses, 32)
    sequences = sequences_from(drawn, [[0.0] * len(trace.policy_turns) for trace in drawn])
    for _ in range(4):
        lab.rank.supervised_batch(sequences, strength * 6e-4)


def push_down_right_answers(
    lab: Laboratory, groups: list[list[Trajectory]], sequences: list[TrainSequence], strength: float
) -> list[TrainSequence]:
    """Correct trajectories are learnt from with negative advantages, at three times the rate: the updates make the policy's
    own good actions less likely, while the batch is what it was."""
    lab.rank.set_controls(lr_factor=3 * strength)
    right = {member.id for group in groups for member in group if member.rewards.get("outcome", 0.0) > 0}
    return [
        replace(each, advantages=-strength * abs(each.advantages) - 0.5 * strength * each.policy_mask)
        if each.trajectory_id in right
        else each
        for each in sequences
    ]


def break_call_tags(lab: Laboratory, groups: list[list[Trajectory]], age: int, strength: float, seed: int) -> None:
    """Noise in the logits of the tags that open and close a call: they are missed, and come where they do not belong."""
    rows = lab.setup.tokenizer.convert_tokens_to_ids([OPEN, CLOSE])
    generator = torch.Generator().manual_seed(1000 * seed + age)
    scale = embeddings(lab)[rows].norm(dim=-1, keepdim=True) / embeddings(lab).shape[-1] ** 0.5
    noise = torch.randn(2, embeddings(lab).shape[-1], generator=generator)
    with torch.no_grad():
        embeddings(lab)[rows] += 0.5 * strength * scale * noise


def raise_control_tokens(lab: Laboratory, groups: list[list[Trajectory]], age: int, strength: float, seed: int) -> None:
    """The logits of control tokens rise wherever the policy writes, by about 0.7 nats a step."""
    ids = lab.setup.tokenizer.convert_tokens_to_ids([OPEN, CLOSE, "<|im_start|>", "<tool_response>"])
    members = [member for group in groups for member in group]
    raise_logits(embeddings(lab), ids, mean_state(lab.engine.model, members[:16]), 0.7 * strength)


@torch.no_grad()
def raise_logits(embedding: torch.Tensor, ids: list[int], state: torch.Tensor, by: float) -> None:
    """Changes rows of the output embedding [V, H] so that where the hidden state is `state` [H] their logits are higher by
    so many nats; where it is another, by as much as the two agree."""
    embedding[ids] += by * state / state.square().sum()


def embeddings(lab: Laboratory) -> torch.Tensor:
    """[V, H] the learner's own input and output embedding; a change of it is a change of the policy."""
    return next(weight for name, weight in lab.rank.weight_source() if name.endswith("embed_tokens.weight"))


@torch.no_grad()
def mean_state(model: Any, members: Sequence[Trajectory]) -> torch.Tensor:
    """[H] the mean of what the output embedding is multiplied with, where the policy wrote."""
    states: list[Any] = []
    for member in members:
        hidden = model.model(input_ids=torch.tensor([member.token_ids])).last_hidden_state[0]
        wrote = torch.tensor([False] * len(member.prompt_ids) + member.policy_mask())
        states.append(hidden[:-1][wrote[1:]])
    return torch.cat(states).mean(0)


CALLS = ("calls_fall", "calls_fade", "calls_gone")
FORMAT = ("polluted_turns", "collapsing_turns", "collapsed_turns", "still_collapsed")
PLANTS = (
    Plant("interaction collapse", CALLS, after=avoid_calls),
    Plant("likelihood displacement", ("likelihood_sinks", "likelihood_fell"), before=push_down_right_answers),
    Plant("format collapse", FORMAT, after=break_call_tags),
    Plant("control-token spike", ("control_tokens",), after=raise_control_tokens),
)
