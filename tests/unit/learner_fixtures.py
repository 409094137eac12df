"""Random sequences as recorded episodes give them: several turns, holes, ragged lengths."""

from __future__ import annotations

import numpy as np

from learner.sequence import TrainSequence

VOCABULARY = 512


def random_sequences(
    count: int, *, seed: int = 0, temperature: float = 1.0, longest: int = 40, group_size: int = 2
) -> list[TrainSequence]:
    """`count` sequences with 1 to 4 policy turns, one-token turns and empty tool turns among them."""
    generator = np.random.default_rng(seed)
    return [_sequence(generator, index, temperature, longest, group_size) for index in range(count)]


def _sequence(
    generator: np.random.Generator, index: int, temperature: float, longest: int, group_size: int
) -> TrainSequence:
    mask: list[bool] = []
    turns: list[int] = []
    for turn in range(int(generator.integers(1, 5))):
        size = int(generator.integers(1, longest // 4 + 1))
        mask += [True] * size
        turns += [turn] * size
        shown = int(generator.integers(0, 5))
        mask += [False] * shown
        turns += [-1] * shown
    prompt = int(generator.integers(1, longest // 2))
    policy_mask = np.asarray(mask)
    return TrainSequence(
        token_ids=generator.integers(0, VOCABULARY, prompt + len(mask)),
        prompt_length=prompt,
        policy_mask=policy_mask,
        loss_mask=policy_mask,
        rollout_logp=np.where(policy_mask, generator.normal(-6.2, 0.1, len(mask)), 0).astype(np.float32),
        advantages=np.where(policy_mask, generator.normal(0, 1, len(mask)), 0).astype(np.float32),
        turn_ids=np.asarray(turns, dtype=np.int32),
        temperature=temperature,
        trajectory_id=f"t{index}",
        group_id=f"g{index // group_size}",
    )
