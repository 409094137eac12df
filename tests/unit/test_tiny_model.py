"""The built-in model and its tokenizer, and how `model.path` becomes a run's model folder."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from toolrl.app.model_folder import ModelNotFound, prepare_model
from toolrl.app.tiny_model import write_tiny_model
from toolrl.app.tiny_tokenizer import TAGS, VOCABULARY_SIZE, build_tokenizer
from toolrl.config import LearnerConfig, ModelConfig, RunConfig
from toolrl.errors import ConfigError

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Runs Python.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]
CALL = {"type": "function", "function": {"name": "python", "arguments": {"code": "print(12 + 34)"}}}
CONVERSATION = [
    {"role": "system", "content": "Use python."},
    {"role": "user", "content": "12 + 34"},
    {"role": "assistant", "content": "", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "46"},
    {"role": "tool", "content": "46"},
    {"role": "assistant", "content": "again", "tool_calls": [CALL]},
    {"role": "tool", "content": "46"},
    {"role": "assistant", "content": "\\boxed{46}"},
]
tokenizer = build_tokenizer()


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_every_digit_and_every_tag_is_one_token() -> None:
    assert len(tokenizer) == VOCABULARY_SIZE
    assert len(tokenizer("print(1234567890)")["input_ids"]) >= 12
    for piece in [*TAGS, *"0123456789"]:
        assert len(tokenizer(piece, add_special_tokens=False)["input_ids"]) == 1, piece
    for token in range(VOCABULARY_SIZE):
        text = tokenizer.decode([token])
        assert not any(c.isdigit() for c in text) or len(text) == 1, f"token {token} {text!r} joins digits"
        assert "\n" not in text[:-1], f"token {token} {text!r} reaches over the end of a line"


def test_a_conversation_is_a_prefix_of_its_continuation() -> None:
    renders = [
        tokenizer.apply_chat_template(
            CONVERSATION[:n], tools=TOOLS, return_dict=False, add_generation_prompt=last == "tool"
        )
        for n, last in ((2, ""), (5, "tool"), (7, "tool"), (8, ""))
    ]
    for shorter, longer in itertools.pairwise(renders):
        assert longer[: len(shorter)] == shorter


def test_a_whole_tool_episode_takes_about_sixty_tokens() -> None:
    question = "State the final answer to the following arithmetic problem: 42 - 25 ="
    messages = [
        {"role": "system", "content": "Use python. Answer in \\boxed{}."},
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "content": "17"},
        {"role": "assistant", "content": "\\boxed{17}"},
    ]
    assert len(tokenizer.apply_chat_template(messages, tools=TOOLS, return_dict=False)) <= 60


def test_the_folder_loads_and_the_seed_decides_the_weights(tmp_path: Path) -> None:
    before = torch.random.get_rng_state()
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_tiny_model(tmp_path / name, seed)
    assert torch.equal(before, torch.random.get_rng_state())
    models = {name: AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in "abc"}
    first = {name: next(iter(model.parameters())) for name, model in models.items()}
    assert torch.equal(first["a"], first["b"])
    assert not torch.equal(first["a"], first["c"])
    assert sum(p.numel() for p in models["a"].parameters()) == 361_216
    loaded = AutoTokenizer.from_pretrained(tmp_path / "a")
    render = loaded.apply_chat_template(CONVERSATION, tools=TOOLS, return_dict=False)
    assert render == tokenizer.apply_chat_template(CONVERSATION, tools=TOOLS, return_dict=False)


def test_a_run_keeps_the_model_folder_it_has(tmp_path: Path) -> None:
    config = RunConfig(name="r", runs_dir=str(tmp_path))
    folder = prepare_model(config)
    assert folder == tmp_path / "r" / "model"
    (folder / "mark").write_text("kept")
    assert prepare_model(config) == folder
    assert (folder / "mark").read_text() == "kept"


def test_a_folder_given_as_model_is_used_with_the_given_template(tmp_path: Path) -> None:
    write_tiny_model(tmp_path / "source", 3)
    (tmp_path / "mine.jinja").write_text("{{ messages[0].content }}")
    model = ModelConfig(path=str(tmp_path / "source"), chat_template=str(tmp_path / "mine.jinja"))
    folder = prepare_model(RunConfig(name="r", runs_dir=str(tmp_path), model=model))
    mine, given_ = (AutoModelForCausalLM.from_pretrained(p).lm_head.weight for p in (folder, tmp_path / "source"))
    assert torch.equal(mine, given_)
    assert AutoTokenizer.from_pretrained(folder).chat_template == "{{ messages[0].content }}"
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(tmp_path / "source").chat_template


@pytest.mark.parametrize("path", ["tiny:qwen4", "./nowhere", "/no/such/folder", "~/none/at/all"])
def test_a_model_that_is_not_there_is_refused_with_the_remedy(tmp_path: Path, path: str) -> None:
    config = RunConfig(name="r", runs_dir=str(tmp_path), model=ModelConfig(path=path))
    with pytest.raises(ModelNotFound, match=r"model\.path.*(tiny:qwen3|folder)"):
        prepare_model(config)
    assert not (tmp_path / "r" / "model").exists()


def test_a_model_whose_rows_the_learner_s_ranks_cannot_share_is_refused(tmp_path: Path) -> None:
    config = RunConfig(name="r", runs_dir=str(tmp_path), learner=LearnerConfig(ranks=3, sequence_parallel=3))
    for _ in range(2):  # the second finds the folder
        with pytest.raises(ConfigError, match="must divide the model's 4 attention heads; one of 1, 2, 4"):
            prepare_model(config)
    config.learner.ranks = config.learner.sequence_parallel = 2
    assert prepare_model(config).is_dir()
