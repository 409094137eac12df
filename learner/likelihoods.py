"""Did the step's updates make the policy's own good actions less likely? Lazy likelihood displacement (arXiv 2512.04220), seen
turn by turn.

Some correct sequences are read before the first update and after the last, in the same micro-batches, so that rounding is the
same and a policy that did not move shows a displacement of exactly 0. Which ones does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from learner.evidence import Reader
from learner.metrics import Sums
from learner.micro_batches import MicroBatch, MicroBatches
from learner.sequence import TrainSequence

TURNS_BY_NAME = 8  # later turns are counted together
_QUANTITIES = ("count", "before", "change", "sinking")


class LikelihoodProbe:
    """Made before the first update; `add` after the last. Both are collective."""

    def __init__(self, chosen: Sequence[TrainSequence], micro_batches: MicroBatches, reader: Reader) -> None:
        self._reader = reader
        self._micros = micro_batches.of(chosen)
        self._before = self._read()

    def add(self, sums: Sums) -> None:
        """Adds each chosen turn's mean log-probability a token before the updates and what they changed."""
        totals = np.zeros((len(_QUANTITIES), TURNS_BY_NAME + 1))
        for micro, before, after in zip(self._micros, self._before, self._read(), strict=True):
            for turn, old, new in _turns(micro, before, after):
                totals[:, min(turn, TURNS_BY_NAME)] += (1.0, old, new - old, float(new < old))
        for quantity, values in zip(_QUANTITIES, torch.from_numpy(totals).to(self._device), strict=True):
            sums.add(**{f"likelihood_{quantity}/{index}": value for index, value in enumerate(values.unbind())})

    @property
    def _device(self) -> torch.device:
        return self._micros[0].batch.input_ids.device

    def _read(self) -> list[np.ndarray]:
        found = self._reader.by_policy(self._micros)
        return [logp.double().cpu().numpy() for logp in found]


def chosen_sequences(sequences: Sequence[TrainSequence], count: int) -> list[TrainSequence]:
    """At most `count` correct ones, evenly spread over the batch."""
    correct = [sequence for sequence in sequences if sequence.is_correct and sequence.policy_mask.any()]
    count = min(count, len(correct))
    return [correct[index * len(correct) // count] for index in range(count)]


def likelihood_metrics(sums: Sums) -> dict[str, float]:
    """`likelihood/…` and `displacement/…`; nothing where no sequence was read."""
    if "likelihood_count/0" not in sums.totals:
        return {}
    count, before, change, sinking = (
        [float(sums.totals[f"likelihood_{quantity}/{index}"]) for index in range(TURNS_BY_NAME + 1)]
        for quantity in _QUANTITIES
    )
    turns = sum(count)
    if not turns:
        return {}
    found = {"displacement/mean": sum(change) / turns, "displacement/share_sinking": sum(sinking) / turns}
    for index, of_turn in enumerate(count):
        name = f"turn_{index + 1}" if index < TURNS_BY_NAME else f"turn_{index + 1}_on"
        if of_turn:
            found[f"likelihood/correct/{name}"] = before[index] / of_turn
            found[f"displacement/{name}"] = change[index] / of_turn
    return found


def _turns(micro: MicroBatch, before: np.ndarray, after: np.ndarray) -> list[tuple[int, float, float]]:
    """(turn's index in its trajectory, mean log-probability before, after) of every turn with tokens."""
    found = []
    begin = 0
    for sequence in micro.sequences:
        turns = sequence.turn_ids[sequence.policy_mask]
        end = begin + len(turns)
        for turn in np.unique(turns):
            its = turns == turn
            found.append((sequence.first_turn + int(turn), before[begin:end][its].mean(), after[begin:end][its].mean()))
        begin = end
    return found
