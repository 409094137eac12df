"""What is measured while training: sums on the device, added over micro-batches and ranks, read once a batch, then named."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from learner.sequence import TrainSequence
from learner.ulysses import RankGroups
from toolrl.algorithms.diagnostics import N_SUMS, combine, range_metrics, ratio_metrics


@dataclass(slots=True)
class Sums:
    """What one rank saw, added over micro-batches and updates; float64 on the device."""

    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    largest: dict[str, torch.Tensor] = field(default_factory=dict)
    ratios: list[torch.Tensor] = field(default_factory=list)

    def add(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            value = value.detach().double()
            self.totals[name] = self.totals[name] + value if name in self.totals else value

    def keep_largest(self, **values: torch.Tensor) -> None:
        for name, value in values.items():
            value = value.detach().double()
            self.largest[name] = torch.maximum(self.largest[name], value) if name in self.largest else value

    def over_ranks(self, groups: RankGroups) -> Sums:
        """The same of all ranks; every rank must have seen the same names. Ranks that share a row saw the same numbers."""
        if groups.data_ranks == 1:
            return self
        names, tops = sorted(self.totals), sorted(self.largest)
        ratios = combine(self.ratios) if self.ratios else torch.zeros(N_SUMS, dtype=torch.float64)
        device = next(iter(self.totals.values())).device
        added = torch.cat([torch.stack([self.totals[name] for name in names]), ratios.to(device)])
        highest = torch.stack([self.largest[name] for name in tops] + [ratios[0].to(device)])
        torch.distributed.all_reduce(added, group=groups.data_group)
        torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=groups.data_group)
        joined = added[len(names) :].clone()
        joined[0] = highest[-1]
        return Sums(
            dict(zip(names, added, strict=False)),
            dict(zip(tops, highest, strict=False)),
            [joined] if self.ratios else [],
        )

    def ratio_metrics(self) -> dict[str, float]:
        if not self.ratios:
            return {}
        sums = combine(self.ratios)
        return {name: float(value) for name, value in ratio_metrics(sums).items()} | range_metrics(sums)


def policy_metrics(sums: Sums, updates: int) -> dict[str, float]:
    """Names of docs/learner.md; losses are averaged over the batch's updates."""
    totals = {name: float(value) for name, value in sums.totals.items()}
    tokens = max(1.0, totals["tokens"])
    metrics = {
        "loss/policy": totals["policy_loss"] / updates,
        "entropy/mean": totals["entropy"] / tokens,
        "logp/mean": totals["logp"] / tokens,
        "gap/mean": totals["gap"] / tokens,
        "gap/max": float(sums.largest["gap"]),
    }
    metrics |= {
        f"{'kl/mean' if name == 'term_kl' else 'loss/' + name[5:]}": value / updates
        for name, value in totals.items()
        if name.startswith("term_")
    }
    return metrics | sums.ratio_metrics()


def critic_metrics(sums: Sums, updates: int, explained: float, steps: Sequence[tuple[float, bool]]) -> dict[str, float]:
    """`steps`: (gradient norm, whether it was applied) of each optimiser step of the critic."""
    totals = {name: float(value) for name, value in sums.totals.items() if name.startswith("value_")}
    norms = [norm for norm, applied in steps if applied]
    return {
        "critic/value_loss": totals["value_loss"] / updates,
        "critic/clip_fraction": totals["value_clipped"] / max(1.0, totals["value_turns"]),
        "critic/explained_variance": explained,
        "critic/grad_norm": sum(norms) / len(norms) if norms else float("inf"),
        "critic/skipped_steps": float(len(steps) - len(norms)),
    }


def supervised_metrics(sums: Sums) -> dict[str, float]:
    tokens = max(1.0, float(sums.totals["tokens"]))
    return {
        "loss/supervised": float(sums.totals["supervised_loss"]),
        "entropy/mean": float(sums.totals["entropy"]) / tokens,
    }


def step_metrics(
    sequences: Sequence[TrainSequence], steps: Sequence[tuple[float, bool]], rate: float, empty_updates: int
) -> dict[str, float]:
    """What every kind of batch has.

    Args:
        steps: (gradient norm, whether it was applied) of each optimiser step that was tried.
        empty_updates: those for which there was none to try, because no token of theirs is in the loss.
    """
    norms = [norm for norm, _ in steps]
    finite = [norm for norm in norms if norm < float("inf")]
    skipped = sum(not applied for _, applied in steps)
    return {
        "grad/norm": sum(finite) / len(finite) if finite else max(norms, default=0.0),
        "grad/norm_max": max(norms, default=0.0),
        "lr": rate,
        "skipped_steps": float(skipped),
        "empty_updates": float(empty_updates),
        "alarm/nonfinite": float(skipped > 0),
        "tokens/policy": float(sum(int(sequence.policy_mask.sum()) for sequence in sequences)),
        "tokens/total": float(sum(len(sequence.token_ids) for sequence in sequences)),
    }
