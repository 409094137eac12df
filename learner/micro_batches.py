"""One rank's share of the work: the plan that all ranks make alike, and its micro-batches packed on the rank's device.

Training and reading take the same path, so what is read of a batch before its first step is what that step sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass

import torch

from learner.packing import PackedBatch, model_line, pack
from learner.planning import plan_micro_batches
from learner.prefixes import PrefixOrder, sharing_on
from learner.sequence import TrainSequence
from learner.ulysses import RankGroups
from toolrl.config import LearnerConfig


@dataclass(slots=True)
class MicroBatch:
    """One rank's share of a micro-batch."""

    members: list[int]  # indices of its sequences in what was planned
    sequences: list[TrainSequence]
    batch: PackedBatch


class MicroBatches:
    """Cuts sequences into micro-batches as `config` says."""

    def __init__(self, config: LearnerConfig, groups: RankGroups, device: torch.device) -> None:
        self._groups, self._device = groups, device
        self._max_tokens, self._chunk = config.tokens_per_micro_batch, config.logprob_chunk_tokens
        self._sharing = sharing_on(device, config.share_prefixes)

    def without_sharing(self) -> MicroBatches:
        """The same, but each sequence stands in the row alone."""
        other = copy(self)
        other._sharing = "off"
        return other

    def plan(self, sequences: Sequence[TrainSequence]) -> list[list[list[int]]]:
        """[micro-batch][data rank] -> indices of sequences; the same on every rank."""
        prefixes = PrefixOrder([model_line(sequence) for sequence in sequences], self._sharing)
        return plan_micro_batches(prefixes, ranks=self._groups.data_ranks, max_tokens=self._max_tokens)

    def of(self, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
        """This rank's, equally many on every rank; a rank's share of one may be empty."""
        made, most = [], []
        for shares in self.plan(sequences):
            share = shares[self._groups.data_rank]
            mine = [sequences[index] for index in share]
            batch = pack(mine, self._sharing).on(self._device)
            batch.row_slice = self._groups.slice_of(batch.input_ids.shape[1])
            made.append(MicroBatch(share, mine, batch))
            most.append(max(sum(int(sequences[index].policy_mask.sum()) for index in part) for part in shares))
        if self._groups.sequence is not None:
            most = self._most_of_a_slice([micro.batch for micro in made])
        # Under ZeRO-3 every call of the head is a collective: all ranks call it equally often.
        for micro, rows in zip(made, most, strict=True):
            micro.batch.head_pieces = max(1, -(-rows // self._chunk))
        return made

    def _most_of_a_slice(self, batches: Sequence[PackedBatch]) -> list[int]:
        """For each micro-batch the most rows of the head on one rank. Only who packed a row knows how they lie on its slices, so
        the ranks ask each other; collective."""
        rows = torch.tensor([len(batch.own(batch.head_rows).rows) for batch in batches], device=self._device)
        torch.distributed.all_reduce(rows, op=torch.distributed.ReduceOp.MAX)
        return [int(each) for each in rows.tolist()]
