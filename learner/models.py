"""The models of one rank (the policy in its DeepSpeed engine, a critic, a reference): made, frozen, saved and exported
together.

Every method is collective: all ranks call it, in the same order.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from learner import lora
from learner.checkpoint import adapter_facts, load_checkpoint, load_critic, save_checkpoint
from learner.critic import make_critic
from learner.deepspeed_engine import DeepSpeedEngine, engine_settings
from learner.export import export_hf
from learner.policy import PolicyModel, check_exact, choose_trained, load_policy
from learner.reference import Reference, make_reference
from learner.settings import RankSettings
from learner.ulysses import check_heads
from learner.weight_source import AdapterSource, WeightSource


class Models:
    """See the module. `critic` and `reference` are None where there is none."""

    def __init__(self, settings: RankSettings, *, rank: int, world: int, with_reference: bool) -> None:
        self._settings, self._rank, self._world = settings, rank, world
        self._device = torch.device(settings.device)
        config = settings.learner
        deepspeed = engine_settings(config, dtype=settings.dtype, world=world)
        self._partition = deepspeed if config.zero_stage == 3 else None  # what ZeRO-3 loads models under
        policy = self._load(gradient_checkpointing=config.gradient_checkpointing)
        check_heads(policy.causal_lm, config.sequence_parallel)
        choose_trained(
            policy.causal_lm,
            adapter=settings.lora,
            frozen=settings.frozen,
            seed=settings.seed,
            reference=with_reference,
        )
        self.critic = make_critic(settings, policy, world=world)
        self.engine = DeepSpeedEngine(policy, config, dtype=settings.dtype, world=world)
        if self._partition is not None:
            check_exact(self.policy, Path(settings.model_dir))
        self.reference: Reference | None = None
        if with_reference:
            self.reference = make_reference(
                settings, self.engine, self._load, partition=self._partition, device=self._device
            )

    @property
    def policy(self) -> PolicyModel:
        module: PolicyModel = self.engine.module
        return module

    def weight_source(self) -> WeightSource:
        """All weights of the policy under their Hugging Face names, an adapter merged; iterating it is collective under
        ZeRO-3."""
        return WeightSource(self.policy.causal_lm)

    def published(self) -> tuple[WeightSource | AdapterSource, dict[str, Any] | None]:
        """See `LearnerRank.published`."""
        adapter, model = self._settings.lora, self.policy.causal_lm
        if not adapter.rank or adapter.publish == "merged":
            return self.weight_source(), None
        return AdapterSource(model), lora.peft_settings(adapter, model, self._settings.model_dir)

    def freeze_reference(self) -> None:
        """The reference model, and a critic that is a copy of the policy, become the policy as it is now."""
        if self.critic is not None:
            self.critic.start_from(self.weight_source())
        if self.reference is not None:
            self.reference.freeze()

    def save(self, folder: Path, counters: dict[str, int]) -> None:
        """A checkpoint: models, optimisers, random states, a reference that moved, and `counters`."""
        critic = None if self.critic is None else self.critic.state()
        save_checkpoint(
            self.engine.raw,
            folder,
            counters,
            self.reference,
            critic,
            adapter=self._adapter_facts,
            rank=self._rank,
            world=self._world,
        )

    def load(self, folder: Path) -> dict[str, int]:
        """What `save` wrote, with the same number of ranks and the same ZeRO stage: the counters."""
        counters = load_checkpoint(
            self.engine.raw,
            folder,
            self.reference,
            adapter=self._adapter_facts,
            rank=self._rank,
            world=self._world,
        )
        if self.critic is not None:
            self.critic.restore(load_critic(folder))
        return counters

    def export(self, folder: Path) -> None:
        """A Hugging Face folder that transformers and vLLM load, written by rank 0; an adapter in `adapter/` too."""
        settings = self._settings
        source, model_dir = self.weight_source(), Path(settings.model_dir)
        export_hf(self.policy.causal_lm, source, model_dir, folder, self._rank, settings.lora)

    @cached_property
    def _adapter_facts(self) -> dict[str, Any] | None:
        return adapter_facts(self.policy.causal_lm, self._settings.lora)

    def _load(self, gradient_checkpointing: bool = False) -> PolicyModel:
        settings = self._settings
        policy = load_policy(
            Path(settings.model_dir),
            dtype=settings.dtype,
            chunk=settings.learner.logprob_chunk_tokens,
            gradient_checkpointing=gradient_checkpointing,
            trust_remote_code=settings.trust_remote_code,
            partition=self._partition,
        )
        if self._partition is None:
            policy.to(self._device)
        return policy
