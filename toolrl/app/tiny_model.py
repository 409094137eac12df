"""The built-in laptop model: Qwen3 architecture, 2 layers, width 128, 0.36 million parameters, weights from a seed.

It is small enough that one core trains it from nothing to working tool calls in a minute or two, and real enough that
transformers, vLLM and DeepSpeed treat it as any Qwen3: `write_tiny_model` leaves an ordinary Hugging Face folder.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from toolrl.app.tiny_tokenizer import END, PAD, VOCABULARY_SIZE, build_tokenizer

NAME = "tiny:qwen3"


def tiny_config(end_id: int, pad_id: int) -> Qwen3Config:
    """Two layers are what copying needs: the first finds each token's predecessor, the second what followed it."""
    return Qwen3Config(
        vocab_size=VOCABULARY_SIZE,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        attention_dropout=0.0,
        initializer_range=0.05,  # narrow layers learn to copy sooner from wider weights than 0.02
        bos_token_id=None,
        eos_token_id=end_id,
        pad_token_id=pad_id,
        dtype="float32",
    )


def write_tiny_model(folder: Path, seed: int) -> None:
    """Writes config, weights and tokenizer to `folder`; the same seed gives the same bytes of weights.

    The caller's random state is left as it was.
    """
    tokenizer = build_tokenizer()
    config = tiny_config(tokenizer.convert_tokens_to_ids(END), tokenizer.convert_tokens_to_ids(PAD))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(config)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id)
    folder.mkdir(parents=True, exist_ok=True)
    with _without_progress_bar():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _without_progress_bar() -> Iterator[None]:
    """A bar for a file of one megabyte would only disturb the run's own screen."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
