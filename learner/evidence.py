"""What is read from policy, critic and reference without training them: for each sequence one array.

Micro-batches are those of training, packed by the same code and read in the same dtype, so a number read here is the number
that the first update sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from learner.activity import Activity
from learner.attention_mass import AttentionProbe, Spans
from learner.control_reading import ControlWatch
from learner.critic_loss import ValueRows
from learner.micro_batches import MicroBatch, MicroBatches
from learner.models import Models
from learner.packing import PackedBatch
from learner.sequence import TrainSequence

ByMember = dict[int, np.ndarray]  # index of the sequence in what was asked for -> its array; one rank's share


class Reader:
    """Reads one rank's share. Every method is collective."""

    def __init__(self, models: Models, micro_batches: MicroBatches, activity: Activity) -> None:
        self._models, self._micro_batches, self._activity = models, micro_batches, activity
        self._forward: Callable[..., tuple[torch.Tensor, ...]] = models.engine

    def logprobs(self, sequences: Sequence[TrainSequence]) -> ByMember:
        """[R] float32 at the sequence's temperature, 0 for tool tokens."""
        return self._read("logprobs", sequences, lambda micro: _in_response(self._forward(micro.batch)[0], micro))

    def token_statistics(self, sequences: Sequence[TrainSequence]) -> ByMember:
        """[P, 2] float32: log-probability and entropy (nats) of each policy token."""
        return self._read("token_statistics", sequences, self._token_statistics)

    def values(self, sequences: Sequence[TrainSequence]) -> ByMember:
        """[K] float32: the critic's value of each turn with tokens. Raises ValueError without a critic."""
        if self._models.critic is None:
            raise ValueError("there is no critic: set critic.kind to shared or own")
        return self._read("values", sequences, self._turn_values)

    def reference_logprobs(self, sequences: Sequence[TrainSequence]) -> ByMember:
        """As `logprobs`, under the reference model. Raises ValueError without one."""
        if self._models.reference is None:
            raise ValueError("there is no reference model: no regulariser `kl` is set")
        micros = self._micro_batches.of(sequences)
        found = self.by_reference([micro.batch for micro in micros])
        return _by_member([(micro, _in_response(logp, micro)) for micro, logp in zip(micros, found, strict=True)])

    def attention_mass(
        self, sequences: Sequence[TrainSequence], spans: Sequence[Sequence[Spans]], layer: int
    ) -> ByMember:
        """[J, 2] float32 for each sequence's J sets of spans: the attention that one layer gives them, see `AttentionProbe`.

        Args:
            layer: counted from the end where it is negative.

        Raises:
            ValueError: there is no such layer.
        """
        layers = self._models.policy.causal_lm.config.get_text_config().num_hidden_layers
        if not -layers <= layer < layers:
            raise ValueError(f"attention_mass: layer {layer} of a model with {layers} layers")
        measured = []
        for micro in self._micro_batches.without_sharing().of(sequences):
            batch = micro.batch
            probe = AttentionProbe(layer % layers, batch, micro.sequences, [spans[index] for index in micro.members])
            with torch.no_grad():
                self._forward(batch, False, batch.head_rows[:1], True, probe)
            measured.append((micro, probe.found))
            self._activity.note("attention_mass")
        return _by_member(measured)

    def by_policy(self, micros: Iterable[MicroBatch], watch: ControlWatch | None = None) -> list[torch.Tensor]:
        """[M] for each micro-batch: log-probabilities under the policy as it is now; `watch` sees what else the pass tells."""
        found = []
        for micro in micros:
            with torch.no_grad():
                logp, entropy, *seen = self._forward(micro.batch, watched=None if watch is None else watch.ids)
            found.append(logp)
            if watch is not None:
                watch.see(micro, entropy, *seen)
            self._activity.note("old_logprobs")
        return found

    def by_reference(self, batches: Sequence[PackedBatch]) -> list[torch.Tensor]:
        """As `by_policy`, of the reference, which there must be; all at once: a model that waits in the host's memory is
        brought to the device once."""
        assert self._models.reference is not None
        found = self._models.reference.logprobs(batches)
        self._activity.note("reference_logprobs")
        return found

    def _read(
        self, phase: str, sequences: Sequence[TrainSequence], measure: Callable[[MicroBatch], list[np.ndarray]]
    ) -> ByMember:
        measured = []
        for micro in self._micro_batches.of(sequences):
            with torch.no_grad():
                measured.append((micro, measure(micro)))
            self._activity.note(phase)
        return _by_member(measured)

    def _token_statistics(self, micro: MicroBatch) -> list[np.ndarray]:
        batch = micro.batch
        logp, entropy = self._forward(batch)[:2]
        grid = torch.stack([batch.grid(logp), batch.grid(entropy)], dim=-1)
        return [grid[row][batch.policy_mask[row]].cpu().numpy() for row in range(len(micro.sequences))]

    def _turn_values(self, micro: MicroBatch) -> list[np.ndarray]:
        critic, rows = self._models.critic, ValueRows.of(micro.batch)
        assert critic is not None
        states = self._forward(micro.batch, False, rows.rows, True) if critic.reads_policy else ()
        return rows.split(critic.values(micro.batch, rows, *states), len(micro.sequences))


def _in_response(logp: torch.Tensor, micro: MicroBatch) -> list[np.ndarray]:
    """[R] float32, 0 for tool tokens, from the [M] of the micro-batch's policy tokens."""
    grid = micro.batch.grid(logp).cpu().numpy()
    found = []
    for row, sequence in zip(grid, micro.sequences, strict=False):
        whole = np.zeros(len(sequence.policy_mask), dtype=np.float32)
        width = min(len(whole), len(row))
        whole[:width] = row[:width]
        found.append(whole)
    return found


def _by_member(measured: list[tuple[MicroBatch, list[np.ndarray]]]) -> dict[int, Any]:
    return {index: array for micro, arrays in measured for index, array in zip(micro.members, arrays, strict=True)}
