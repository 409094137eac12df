"""What is minimised on one micro-batch, divided by global counts, so that the parts of all ranks and micro-batches add
up to one loss.

    loss = Σ w·k·policy_loss + Σ_r (weight_r + extra_r) · Σ w_r·term_r

w follows the aggregation over the whole update (see `toolrl.algorithms.aggregation`), k is the correction for the gap
between engine and trainer, extra_r what a guard adds for a time (see `add_weights`). Everything a metric needs is summed
here on the device and read once at the end.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    supervised_tokens: int  # loss tokens with A > 0
    turns: int  # that a critic is trained on
    valid_calls: float  # mean a trajectory

    @classmethod
    def of(cls, sequences: Sequence[TrainSequence]) -> GlobalCounts:
        calls = {sequence.trajectory_id: sequence.valid_calls for sequence in sequences}
        return cls(
            loss_tokens=sum(int(s.loss_mask.sum()) for s in sequences),
            loss_sequences=sum(bool(s.loss_mask.any()) for s in sequences),
            policy_tokens=sum(int(s.policy_mask.sum()) for s in sequences),
            preserved_tokens=sum(int((s.policy_mask & (s.advantages >= 0)).sum()) for s in sequences),
            supervised_tokens=sum(int((s.loss_mask & (s.advantages > 0)).sum()) for s in sequences),
            turns=sum(len(s.value_targets.returns) for s in sequences if s.value_targets is not None),
            valid_calls=sum(calls.values()) / max(1, len(calls)),
        )


@dataclass(frozen=True, slots=True)
class RegularizerTerm:
    """One regulariser in the loss."""

    name: str
    weight: float
    function: Callable[..., Any]
    options: Mapping[str, Any]


class PolicyObjective:
    """The loss that an `AlgorithmConfig` names; unknown names and options fail at construction or at the first
    batch."""

    def __init__(self, config: AlgorithmConfig, *, max_response_tokens: int) -> None:
        self.policy_loss = policy_loss_registry.get(config.policy_loss.name)
        self.policy_options = dict(config.policy_loss.options)
        self.wants_turn_ids = "turn_ids" in inspect.signature(self.policy_loss).parameters
        self.aggregation = config.aggregation
        self.max_response_tokens = max_response_tokens
        self.correction: Callable[..., torch.Tensor] | None = None
        self.correction_options: dict[str, Any] = {}
        if config.correction is not None:
            self.correction = correction_registry.get(config.correction.name)
            self.correction_options = dict(config.correction.options)
        self.kl_in_reward = False
        self._options: dict[str, dict[str, Any]] = {}  # of each regulariser's first entry
        configured: list[RegularizerTerm] = []
        for named in config.regularizers:
            options = dict(named.options)
            weight = float(options.pop("weight", 1.0))
            in_reward = options.pop("place", "loss") == "reward"  # of kl: a turn reward, see toolrl/app/evidence.py
            self._options.setdefault(named.name, options)
            self.kl_in_reward |= bool(weight) and in_reward
            if weight and not in_reward:
                configured.append(RegularizerTerm(named.name, weight, regularizer_registry.get(named.name), options))
        self._configured = tuple(configured)
        self.terms = self._configured

    def add_weights(self, extra: Mapping[str, float]) -> None:
        """From now on these regularisers weigh so much more in the loss than the config says: {name: extra weight}, in the
        place of what was added before. One that the config has keeps its options; another has its defaults."""
        terms = list(self._configured)
        for name, weight in extra.items():
            found = next((index for index, term in enumerate(terms) if term.name == name), None)
            if found is not None:
                terms[found] = replace(terms[found], weight=terms[found].weight + weight)
            elif weight:
                function, options = regularizer_registry.get(name), self._options.get(name, {})
                terms.append(RegularizerTerm(name, weight, function, options))
        self.terms = tuple(terms)

    @property
    def needs_reference(self) -> bool:
        """Whether there must be a reference model, for the loss or for a reward."""
        return self.kl_in_reward or self.reads_reference

    @property
    def reads_reference(self) -> bool:
        """Whether the loss reads the reference."""
        return any(term.name == "kl" for term in self.terms)

    @property
    def needs_entropy_gradient(self) -> bool:
        return any(term.name == "entropy" for term in self.terms)

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
        engine = batch.engine_logp(old)
        found = self.policy_loss(
            live,
            old,
            batch.advantages,
            batch.policy_mask,
            batch.loss_mask,
            rollout_logp=engine,
            **({"turn_ids": batch.turn_ids} if self.wants_turn_ids else {}),
            **self.policy_options,
        )
        token_loss = found.token_loss
        if self.correction is not None:
            weight = self.correction(old, engine, batch.policy_mask, **self.correction_options)
            token_loss = token_loss * (weight if weight.dim() == 2 else weight[:, None])
        weights = self._weights(batch, counts)
        policy = (inside(token_loss, batch.loss_mask) * weights).sum()
        sums.ratios.append(found.metrics["sums"])
        sums.add(policy_loss=policy)
        self._observe(batch, live, old - engine, batch.grid(entropy.detach()), sums)
        if not self.terms:
            return policy
        inputs = LossInputs(
            logp=live,
            entropy=batch.grid(entropy),
            old_logp=old,
            rollout_logp=engine,
            advantages=batch.advantages,
            policy_mask=batch.policy_mask,
            loss_mask=batch.loss_mask,
            turn_ids=batch.turn_ids,
            ref_logp=None if ref_logp is None else batch.grid(ref_logp),
            valid_calls=counts.valid_calls,
        )
        total = policy
        for each in self.terms:
            term = each.function(inputs, **each.options)
            if term.normalizer == "aggregation":
                value = (term.token_loss * weights).sum()
            else:
                value = term.token_loss.sum() / max(1, getattr(counts, term.normalizer))
            sums.add(**{f"term_{each.name}": value})
            total = total + each.weight * value
        return total

    def _weights(self, batch: PackedBatch, counts: GlobalCounts) -> torch.Tensor:
        denominator = {
            "token_mean": counts.loss_tokens,
            "seq_mean_token_mean": counts.loss_sequences,
            "seq_mean_token_sum_norm": counts.loss_sequences * self.max_response_tokens,
        }[self.aggregation]
        return token_weights(batch.loss_mask, self.aggregation, denominator=max(1, denominator))

    def _observe(
        self, batch: PackedBatch, live: torch.Tensor, gap: torch.Tensor, entropy: torch.Tensor, sums: Sums
    ) -> None:
        with torch.no_grad():
            mask = batch.policy_mask
            gap = inside(gap.abs(), mask)
            sums.add(
                tokens=mask.sum(), entropy=inside(entropy, mask).sum(), gap=gap.sum(), logp=inside(live, mask).sum()
            )
            sums.keep_largest(gap=gap.amax())


def supervised_loss(
    batch: PackedBatch, logp: torch.Tensor, entropy: torch.Tensor, counts: GlobalCounts, sums: Sums
) -> torch.Tensor:
    """−mean log-probability over the supervised tokens of the whole update, this micro-batch's part; `logp` [M]."""
    kept = batch.loss_mask
    loss = -inside(batch.grid(logp), kept).sum() / max(1, counts.loss_tokens)
    sums.add(supervised_loss=loss, tokens=kept.sum(), entropy=inside(batch.grid(entropy.detach()), kept).sum())
    return loss
