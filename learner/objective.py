"""What is minimised on one micro-batch, divided by global counts, so that the parts of all ranks and micro-batches add
up to one loss.

    loss = Σ w·k·policy_loss + Σ_r weight_r · Σ w_r·term_r

w follows the aggregation over the whole update (see `toolrl.algorithms.aggregation`), k is the correction for the gap
between engine and trainer. Everything a metric needs is summed here on the device and read once at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from learner.metrics import Sums
from learner.packing import PackedBatch
from learner.sequence import TrainSequence
from toolrl.algorithms.aggregation import token_weights
from toolrl.algorithms.masks import inside
from toolrl.algorithms.registries import correction_registry, policy_loss_registry, regularizer_registry
from toolrl.algorithms.regularizers.terms import LossInputs
from toolrl.config import AlgorithmConfig


@dataclass(frozen=True, slots=True)
class GlobalCounts:
    """Of one update over all ranks and micro-batches: the denominators."""

    loss_tokens: int
    loss_sequences: int
    policy_tokens: int
    preserved_tokens: int  # policy tokens with A ≥ 0

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence]) -> GlobalCounts:
        return cls(
            loss_tokens=sum(int(s.loss_mask.sum()) for s in sequences),
            loss_sequences=sum(bool(s.loss_mask.any()) for s in sequences),
            policy_tokens=sum(int(s.policy_mask.sum()) for s in sequences),
            preserved_tokens=sum(int((s.policy_mask & (s.advantages >= 0)).sum()) for s in sequences),
        )


class PolicyObjective:
    """The loss that an `AlgorithmConfig` names; unknown names and options fail at construction or at the first
    batch."""

    def __init__(self, config: AlgorithmConfig, *, max_response_tokens: int) -> None:
        self.policy_loss = policy_loss_registry.get(config.policy_loss.name)
        self.policy_options = dict(config.policy_loss.options)
        self.aggregation = config.aggregation
        self.max_response_tokens = max_response_tokens
        self.correction: Callable[..., torch.Tensor] | None = None
        self.correction_options: dict[str, Any] = {}
        if config.correction is not None:
            self.correction = correction_registry.get(config.correction.name)
            self.correction_options = dict(config.correction.options)
        self.terms: list[tuple[str, float, Callable[..., Any], dict[str, Any]]] = []
        for named in config.regularizers:
            options = dict(named.options)
            weight = float(options.pop("weight", 1.0))
            if weight:
                self.terms.append((named.name, weight, regularizer_registry.get(named.name), options))

    @property
    def needs_reference(self) -> bool:
        return any(name == "kl" for name, *_ in self.terms)

    @property
    def needs_entropy_gradient(self) -> bool:
        return any(name == "entropy" for name, *_ in self.terms)

    def loss(
        self,
        batch: PackedBatch,
        logp: torch.Tensor,
        entropy: torch.Tensor,
        old_logp: torch.Tensor | None,
        ref_logp: torch.Tensor | None,
        counts: GlobalCounts,
        sums: Sums,
    ) -> torch.Tensor:
        """This micro-batch's part of the update's loss, 0-dim. Log-probabilities and entropies come as [M].

        Args:
            old_logp: None where the weights have not changed since the batch was formed: then it *is* `logp`, detached.
        """
        live = batch.grid(logp)
        old = live.detach() if old_logp is None else batch.grid(old_logp)
        found = self.policy_loss(
            live,
            old,
            batch.advantages,
            batch.policy_mask,
            batch.loss_mask,
            rollout_logp=batch.rollout_logp,
            **self.policy_options,
        )
        token_loss = found.token_loss
        if self.correction is not None:
            weight = self.correction(old, batch.rollout_logp, batch.policy_mask, **self.correction_options)
            token_loss = token_loss * (weight if weight.dim() == 2 else weight[:, None])
        weights = self._weights(batch, counts)
        policy = (inside(token_loss, batch.loss_mask) * weights).sum()
        sums.ratios.append(found.metrics["sums"])
        sums.add(policy_loss=policy)
        self._observe(batch, live, old, batch.grid(entropy.detach()), sums)
        if not self.terms:
            return policy
        inputs = LossInputs(
            logp=live,
            entropy=batch.grid(entropy),
            old_logp=old,
            rollout_logp=batch.rollout_logp,
            advantages=batch.advantages,
            policy_mask=batch.policy_mask,
            loss_mask=batch.loss_mask,
            turn_ids=batch.turn_ids,
            ref_logp=None if ref_logp is None else batch.grid(ref_logp),
        )
        total = policy
        for name, strength, function, options in self.terms:
            term = function(inputs, **options)
            if term.normalizer == "aggregation":
                value = (term.token_loss * weights).sum()
            else:
                value = term.token_loss.sum() / max(1, getattr(counts, term.normalizer))
            sums.add(**{f"term_{name}": value})
            total = total + strength * value
        return total

    def _weights(self, batch: PackedBatch, counts: GlobalCounts) -> torch.Tensor:
        denominator = {
            "token_mean": counts.loss_tokens,
            "seq_mean_token_mean": counts.loss_sequences,
            "seq_mean_token_sum_norm": counts.loss_sequences * self.max_response_tokens,
        }[self.aggregation]
        return token_weights(batch.loss_mask, self.aggregation, denominator=max(1, denominator))

    def _observe(
        self, batch: PackedBatch, live: torch.Tensor, old: torch.Tensor, entropy: torch.Tensor, sums: Sums
    ) -> None:
        with torch.no_grad():
            mask = batch.policy_mask
            gap = inside((old - batch.rollout_logp).abs(), mask)
            sums.add(tokens=mask.sum(), entropy=entropy.sum(), gap=gap.sum(), logp=inside(live, mask).sum())
            sums.keep_largest(gap=gap.amax())


def supervised_loss(
    batch: PackedBatch, logp: torch.Tensor, entropy: torch.Tensor, counts: GlobalCounts, sums: Sums
) -> torch.Tensor:
    """−mean log-probability over the supervised tokens of the whole update, this micro-batch's part; `logp` [M]."""
    kept = batch.loss_mask
    loss = -inside(batch.grid(logp), kept).sum() / max(1, counts.loss_tokens)
    sums.add(supervised_loss=loss, tokens=kept.sum(), entropy=batch.grid(entropy.detach()).sum())
    return loss
