"""Sequence parallelism (Ulysses, Jacobs et al. 2023): several ranks share one packed row, each holds a slice of its tokens.

Every layer but attention works on single tokens, so a rank computes it for its slice. Around attention the ranks exchange
tokens for heads (all-to-all): each then has the whole row for its share of the heads, so the row's masks, restarted
positions and shared prefixes hold unchanged, and afterwards they exchange back. The parameters' gradients of the slices
add up to the row's, as those of different rows do.

The exchange is DeepSpeed's `UlyssesSPAttentionHF` around our attention, as it is: made for NCCL, it runs on gloo too, which has
all-to-all, and under every ZeRO stage. What DeepSpeed offers around it is not used:

- `register_with_transformers` puts it in place of transformers' own attention functions, and allows one a process.
- An `mpu` would make DeepSpeed divide gradients by the data groups; without one ZeRO splits over all ranks just the same
  and divides by their number, which `DeepSpeedEngine.backward` takes back, as for ranks with rows of their own.
- `DistributedAttention`, the older class, refuses fewer key and value heads than ranks; the newer one hands each of them to
  several ranks.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from learner.layout import PackedLayout
from learner.row_slices import RowSlice
from toolrl.config_sequence_parallel import heads_problem

Attention = Callable[..., tuple[torch.Tensor, None]]  # packed_attention's signature


class SequenceGroup:
    """The ranks that share a packed row, seen from one of them."""

    def __init__(self, group: Any, *, size: int, rank: int) -> None:
        """`rank`: this one's place in the row."""
        self.group, self.size, self.rank = group, size, rank
        self._exchanges: dict[tuple[int, ...], Any] = {}

    def attend(
        self,
        attention: Attention,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """[1, n, H · D] for this rank's n tokens from query [1, H, n, D] and key, value [1, H_kv, n, D]; collective.

        `attention` is called as transformers calls it, with the N tokens of the row and H / size heads.
        """
        heads = (query.shape[1], key.shape[1], query.shape[3])
        if heads not in self._exchanges:
            self._exchanges[heads] = self._exchange(attention, *heads)
        # It gathers position ids for kernels that find sequences by them. Ours has the layout: one number instead of one a token.
        found: tuple[torch.Tensor, None] = self._exchanges[heads](
            module, query, key, value, None, position_ids=query.new_zeros(1, 1), **options
        )
        return found

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Of the ranks' values, without gradient; collective."""
        torch.distributed.all_reduce(values, group=self.group)
        return values / self.size

    def _exchange(self, attention: Attention, heads: int, key_value_heads: int, head_size: int) -> Any:
        from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

        return UlyssesSPAttentionHF(
            attn=_without_filling(attention),
            batch_size=1,
            attn_head_count=heads,
            attn_head_size=head_size,
            kv_head_count=key_value_heads,
            num_hidden_layers=1,  # read by its debug mode only
            process_group=self.group,
            seq_length_is_variable=True,
        )


@dataclass(frozen=True, slots=True)
class RankGroups:
    """A rank's place: the ranks are data groups × sequence groups, those of one sequence group are neighbours."""

    data_rank: int  # which of a micro-batch's rows it works on
    data_ranks: int  # rows of a micro-batch
    data_group: Any = None  # the ranks that hold the same slice of all rows; None: all ranks
    sequence: SequenceGroup | None = None  # None: its row is its own

    @classmethod
    def of(cls, size: int, *, rank: int, world: int, timeout_s: float) -> RankGroups:
        """Sequence groups of `size` ranks; collective where that is above 1.

        Raises:
            ValueError: `size` does not divide the ranks.
        """
        if size == 1:
            return cls(rank, world)
        if world % size:
            raise ValueError(f"learner.sequence_parallel={size} does not divide learner.ranks={world}")
        timeout = datetime.timedelta(seconds=timeout_s)
        subgroups = torch.distributed.new_subgroups_by_enumeration
        rows = [list(range(first, first + size)) for first in range(0, world, size)]
        row, _ = subgroups(rows, timeout=timeout)
        data, _ = subgroups([list(slices) for slices in zip(*rows, strict=True)], timeout=timeout)
        return cls(rank // size, world // size, data, SequenceGroup(row, size=size, rank=rank % size))

    def slice_of(self, tokens: int) -> RowSlice | None:
        """What this rank holds of a row of so many tokens; None: all of it."""
        return None if self.sequence is None else RowSlice.of(self.sequence, tokens)


def check_heads(causal_lm: Any, size: int) -> None:
    """Raises ValueError where `size` ranks cannot share out the attention heads of a model of transformers."""
    config = causal_lm.config.get_text_config()
    heads = config.num_attention_heads
    if problem := heads_problem(heads, getattr(config, "num_key_value_heads", None) or heads, size):
        raise ValueError(f"learner.sequence_parallel={size} {problem}")


def _without_filling(attention: Attention) -> Attention:
    """The same of a row that was filled up at its end; 0 comes out there."""

    def of_row(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_layout: PackedLayout,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        tokens, filled = len(packed_layout.positions), query.shape[2]
        parts = (part[:, :, :tokens] for part in (query, key, value))
        out, _ = attention(module, *parts, attention_mask, packed_layout=packed_layout, **options)
        return pad(out, (0, 0, 0, 0, 0, filled - tokens)), None

    return of_row
