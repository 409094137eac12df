"""GTPO's shaped outcomes: a wrong trajectory earns something where its code is like that of the right ones.

    outcome_i = 1 where correct, else (α/|P|) · Σ_{p∈P} max(0, cos(e(code_i), e(code_p)))

P: the correct trajectories of the group; 0 without P or without code. `code_i` is the code of trajectory i, e a
deterministic local embedder (`embedders`), α = .5. The group reward `code_similarity` is this over recorded trajectories.
Trap: divide by |P| once (a public port divides twice). A correct trajectory without code is in P and adds 0.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toolrl.reward_records import FULL_SCORE


def gtpo_outcome(
    correct: Sequence[float], embeddings: Sequence[Sequence[float] | None], alpha: float = 0.5
) -> list[float]:
    """Shaped outcomes of one group: 1 where `correct` is 1, else α times the mean similarity to the correct ones' code.

    Args:
        correct: G floats, 1 for a correct trajectory.
        embeddings: G vectors of each trajectory's joined code; None: no code (outcome 0 when wrong; as a correct one
            it adds 0).
    """
    units = [_unit(embedding) for embedding in embeddings]
    right = [unit for value, unit in zip(correct, units, strict=True) if value >= FULL_SCORE]
    shaped = []
    for value, unit in zip(correct, units, strict=True):
        if value >= FULL_SCORE:
            shaped.append(1.0)
        elif unit is None or not right:
            shaped.append(0.0)
        else:
            similar = sum(max(0.0, float(unit @ other)) for other in right if other is not None)
            shaped.append(alpha * similar / len(right))
    return shaped


def _unit(embedding: Sequence[float] | None) -> np.ndarray | None:
    if embedding is None:
        return None
    vector = np.asarray(embedding, dtype=np.float64)
    length = float(np.linalg.norm(vector))
    return vector / length if length else vector
