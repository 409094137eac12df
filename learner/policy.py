"""The policy as a module that reads packed batches: (log-probabilities, entropies) of the policy's tokens.

At start `check_exact` compares it with the model's own forward pass on separate rows: an architecture whose layers mix
tokens in another way (recurrent states), or whose logits are post-processed after the head, is refused instead of
trained wrongly.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from learner import lora
from learner.attention import NAME as PACKED_ATTENTION
from learner.attention_mass import AttentionProbe
from learner.gathering import whole_shape
from learner.logprobs import token_logprobs
from learner.norms import quicken
from learner.packing import PackedBatch, pack
from learner.sequence import TrainSequence
from toolrl.config import LoraConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A causal language model of transformers behind the packed interface."""

    def __init__(self, causal_lm: torch.nn.Module, *, chunk: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk = chunk

    def forward(
        self,
        batch: PackedBatch,
        entropy_gradient: bool = False,
        state_rows: torch.Tensor | None = None,
        states_only: bool = False,
        probe: AttentionProbe | None = None,
        watched: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """(logp [M], entropy [M]) of the batch's policy tokens, float32; all of them on every rank that holds a slice of the row.

        Args:
            state_rows: [K] rows of the batch whose last hidden states come as a third tensor, for a value head: [K, H], or those
                of this rank's slice.
            states_only: only those, without the vocabulary's head.
            probe: looks at the attention of a layer on the way.
            watched: [C] tokens whose log-probabilities [M, C] come as the last tensor.
        """
        hidden = hidden_states(self.causal_lm.base_model, batch, probe)
        states = () if state_rows is None else (hidden.index_select(0, batch.own(state_rows).rows),)
        if states_only:
            return states
        own = batch.own(batch.head_rows)
        logp, entropy, *seen = token_logprobs(
            self.causal_lm.get_output_embeddings(),
            hidden.index_select(0, own.rows),
            own.of_all(batch.targets),
            inverse_temperature=None if batch.inverse_temperature is None else own.of_all(batch.inverse_temperature),
            pieces=max(batch.head_pieces, -(-len(own.rows) // self.chunk)),
            entropy_gradient=entropy_gradient,
            watched=watched,
        )
        return (own.join(logp), own.join(entropy), *states, *map(own.join, seen))


def hidden_states(backbone: torch.nn.Module, batch: PackedBatch, probe: AttentionProbe | None = None) -> torch.Tensor:
    """[N, H] the last hidden states of the packed row, or [n, H] of this rank's slice of it."""
    states: torch.Tensor = backbone(
        input_ids=batch.held(batch.input_ids),
        position_ids=batch.held(batch.position_ids),
        packed_layout=batch.layout,
        row_slice=batch.row_slice,
        attention_probe=probe,
        use_cache=False,
    ).last_hidden_state[0]
    return states


def load_policy(
    model_dir: Path,
    *,
    dtype: str,
    chunk: int,
    gradient_checkpointing: bool = False,
    trust_remote_code: bool = False,
    partition: dict[str, Any] | None = None,
) -> PolicyModel:
    """The policy from a Hugging Face folder, checked to be exact on packed sequences.

    `partition`: DeepSpeed's config, for a model that ZeRO-3 splits over the ranks while it is loaded. Such a model can compute
    only inside its DeepSpeed engine: call `check_exact` there.
    """
    transformers_logging.disable_progress_bar()
    options = {
        "dtype": DTYPES[dtype],
        "attn_implementation": PACKED_ATTENTION,
        "trust_remote_code": trust_remote_code,
    }
    if partition is None:
        causal_lm = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True, **options)
    else:
        from learner.partitioned import load_partitioned

        causal_lm = load_partitioned(model_dir, partition, **options)
    quicken(causal_lm)
    _without_dropout(causal_lm)
    policy = PolicyModel(causal_lm, chunk=chunk)
    if partition is None:
        check_exact(policy, model_dir)
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    return policy


def _without_dropout(causal_lm: torch.nn.Module) -> None:
    """The same tokens must have the same log-probabilities in every pass; `train()` is for gradient checkpointing alone."""
    for module in causal_lm.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def choose_trained(
    causal_lm: Any, *, adapter: LoraConfig, frozen: Sequence[str], seed: int, reference: bool = False
) -> None:
    """Decides which weights are trained: an adapter alone (`adapter.rank` above 0), or all but those of the patterns.

    `reference`: whether the adapter gets a copy that can be frozen later (`learner.reference`).

    Raises:
        ValueError: a pattern fits no weight, nothing is left to train, or both ways are asked for.
    """
    if adapter.rank:
        if frozen:
            raise ValueError("model.frozen has no meaning with model.lora, which trains the adapter alone; remove one")
        lora.add_adapter(causal_lm, adapter, seed=seed, reference=reference)
        return
    for pattern in frozen:
        found = [each for name, each in causal_lm.named_parameters() if fnmatchcase(name, pattern)]
        if not found:
            some = ", ".join(name for name, _ in list(causal_lm.named_parameters())[:3])
            raise ValueError(f"model.frozen: no weight is called {pattern!r}; the model has {some}, …")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(parameter.requires_grad for parameter in causal_lm.parameters()):
        raise ValueError(f"model.frozen={list(frozen)} leaves nothing to train")


def check_exact(policy: PolicyModel, model_dir: Path) -> None:
    """Raises ValueError when packed log-probabilities differ from the model's own on separate rows; collective in ZeRO-3."""
    training = policy.training
    policy.eval()
    vocabulary = whole_shape(policy.causal_lm.get_output_embeddings().weight)[0]
    generator = np.random.default_rng(0)
    shared, *ends = (generator.integers(0, vocabulary, size=size) for size in (20, 5, 12, 9))
    rows = [ends[2], *(np.concatenate([shared, end]) for end in ends[:2])]
    with torch.no_grad():
        ours = policy(pack([_probe(row) for row in rows], "on").on(policy.causal_lm.device))[0]
        theirs = torch.cat([_separate(policy.causal_lm, row) for row in rows])
    policy.train(training)
    gap = float((ours - theirs).abs().max())
    bound = 1e-3 if policy.causal_lm.dtype == torch.float32 else 0.2
    if not gap <= bound:
        raise ValueError(
            f"model {model_dir}: packed log-probabilities differ from separate rows by {gap:.3g} (bound {bound}); "
            f"{type(policy.causal_lm).__name__} mixes tokens or logits in a way that this learner does not support"
        )


def _separate(causal_lm: Any, row: np.ndarray) -> torch.Tensor:
    """[len(row) - 1] log-probabilities by the model's own forward pass and attention."""
    ids = torch.from_numpy(row)[None].to(causal_lm.device)
    causal_lm.set_attn_implementation("sdpa")
    try:
        logits = causal_lm(input_ids=ids, use_cache=False).logits[0, :-1].float()
    finally:
        causal_lm.set_attn_implementation(PACKED_ATTENTION)
    return logits.log_softmax(-1).gather(1, ids[0, 1:, None]).squeeze(1)


def _probe(row: np.ndarray) -> TrainSequence:
    response = len(row) - 1
    ones, zeros = np.ones(response, dtype=bool), np.zeros(response, dtype=np.float32)
    return TrainSequence(
        token_ids=row,
        prompt_length=1,
        policy_mask=ones,
        loss_mask=ones,
        rollout_logp=zeros,
        advantages=zeros,
        turn_ids=np.zeros(response, dtype=np.int32),
    )
