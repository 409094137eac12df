"""The trajectories that every side of `toolrl bench learner` trains on: the same numbers in every process.

Groups of 8 share a prompt. A trajectory has 1 to 5 policy turns of 10 to 40 tokens, tool results of 5 to 60 tokens between
them, and ends with a policy turn. Its advantage is its reward's, normalised in the group as TRL does it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

GROUP = 8
VOCABULARY = 512
RATE, CLIP = 1e-4, 1.0  # of AdamW without weight decay, and of the gradient's norm
ROWS = 8  # of a padded micro-batch: the default of TRL and of transformers


@dataclass(frozen=True, slots=True)
class Case:
    """`prompt`: tokens, ±20 % between groups. `updates`: optimiser steps on the batch, of as many trajectories each."""

    prompt: int
    groups: int
    updates: int

    def __post_init__(self) -> None:
        if self.groups % self.updates:
            raise ValueError(f"{self.groups} groups do not part into {self.updates} equal updates")


@dataclass(frozen=True, slots=True)
class Sample:
    """One trajectory. `turns` [R]: the policy turn of each response token, -1 for tokens of a tool."""

    group: int
    prompt: np.ndarray  # [P] int64
    response: np.ndarray  # [R] int64
    turns: np.ndarray  # [R] int32
    reward: float
    advantage: float

    @property
    def mask(self) -> np.ndarray:
        """[R] bool: what the policy said."""
        return np.asarray(self.turns >= 0)

    @property
    def tokens(self) -> int:
        """What a model must read to train on this trajectory by itself: all but the last token, which predicts nothing."""
        return len(self.prompt) + len(self.response) - 1


def samples(case: Case, seed: int = 0) -> list[Sample]:
    """[8 · groups], group by group."""
    draw = np.random.default_rng(seed)
    made = []
    for group in range(case.groups):
        prompt = draw.integers(0, VOCABULARY, int(case.prompt * draw.uniform(0.8, 1.2)))
        rewards = draw.uniform(0, 1, GROUP)
        # TRL's constant and its unbiased deviation, so that both sides minimise the same loss.
        advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
        for reward, advantage in zip(rewards, advantages, strict=True):
            turns = _turns(draw)
            response = draw.integers(0, VOCABULARY, len(turns))
            made.append(Sample(group, prompt, response, turns, float(reward), float(advantage)))
    return made


def _turns(draw: np.random.Generator) -> np.ndarray:
    sizes = [(int(draw.integers(10, 41)), int(draw.integers(5, 61))) for _ in range(int(draw.integers(1, 6)))]
    parts = [np.r_[np.full(said, turn), np.full(shown, -1)] for turn, (said, shown) in enumerate(sizes)]
    return np.asarray(np.concatenate(parts)[: -sizes[-1][1]], dtype=np.int32)


def padded_width(made: list[Sample]) -> int:
    """Tokens of a row that holds the longest prompt and the longest response."""
    return max(len(sample.prompt) for sample in made) + max(len(sample.response) for sample in made)
