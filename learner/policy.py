"""The policy as a module that reads packed batches: (log-probabilities, entropies) of the policy's tokens.

At start `check_exact` compares it with the model's own forward pass on separate rows: an architecture whose layers mix
tokens in another way (recurrent states), or whose logits are post-processed after the head, is refused instead of
trained wrongly.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from learner.attention import NAME as PACKED_ATTENTION
from learner.logprobs import token_logprobs
from learner.norms import quicken
from learner.packing import PackedBatch, pack
from learner.sequence import TrainSequence

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class PolicyModel(torch.nn.Module):  # type: ignore[misc]  # torch is untyped here
    """A causal language model of transformers behind the packed interface."""

    def __init__(self, causal_lm: torch.nn.Module, *, chunk: int) -> None:
        super().__init__()
        self.causal_lm = causal_lm
        self.chunk = chunk

    def forward(self, batch: PackedBatch, entropy_gradient: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """(logp [M], entropy [M]) of the batch's policy tokens, float32."""
        hidden = self.causal_lm.base_model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            packed_layout=batch.layout,
            use_cache=False,
        ).last_hidden_state[0]
        return token_logprobs(
            self.causal_lm.get_output_embeddings(),
            hidden.index_select(0, batch.head_rows),
            batch.targets,
            inverse_temperature=batch.inverse_temperature,
            pieces=max(batch.head_pieces, -(-len(batch.targets) // self.chunk)),
            entropy_gradient=entropy_gradient,
        )


def load_policy(
    model_dir: Path, *, dtype: str, chunk: int, gradient_checkpointing: bool = False, trust_remote_code: bool = False
) -> PolicyModel:
    """The policy from a Hugging Face folder, checked to be exact on packed sequences."""
    transformers_logging.disable_progress_bar()
    causal_lm = AutoModelForCausalLM.from_pretrained(
        model_dir,
        dtype=DTYPES[dtype],
        attn_implementation=PACKED_ATTENTION,
        trust_remote_code=trust_remote_code,
        local_files_only=True,
    )
    quicken(causal_lm)
    policy = PolicyModel(causal_lm, chunk=chunk)
    check_exact(policy, model_dir)
    if gradient_checkpointing:
        causal_lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy.train()
    return policy


def check_exact(policy: PolicyModel, model_dir: Path) -> None:
    """Raises ValueError when packed log-probabilities differ from the model's own on separate rows."""
    policy.eval()
    vocabulary = policy.causal_lm.get_output_embeddings().weight.shape[0]
    generator = np.random.default_rng(0)
    rows = [generator.integers(0, vocabulary, size=size) for size in (9, 5, 12)]
    with torch.no_grad():
        ours = policy(pack([_probe(row) for row in rows]))[0]
        theirs = torch.cat([_separate(policy.causal_lm, row) for row in rows])
    gap = float((ours - theirs).abs().max())
    bound = 1e-3 if policy.causal_lm.dtype == torch.float32 else 0.2
    if not gap <= bound:
        raise ValueError(
            f"model {model_dir}: packed log-probabilities differ from separate rows by {gap:.3g} (bound {bound}); "
            f"{type(policy.causal_lm).__name__} mixes tokens or logits in a way that this learner does not support"
        )


def _separate(causal_lm: Any, row: np.ndarray) -> torch.Tensor:
    """[len(row) - 1] log-probabilities by the model's own forward pass and attention."""
    ids = torch.from_numpy(row)[None]
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
