"""Process reward models: random classifiers of transformers, asked directly and through the reward worker's scorer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from actors.reward_worker import RewardWorker
from tests.episodes import ANSWER, END, call, play, tiny
from toolrl.app.tiny_tokenizer import PAD, VOCABULARY_SIZE
from toolrl.errors import UserError
from toolrl.registry import UnknownName
from toolrl.rewards.prm import PrmOptions, StepScorer, step_scorer
from toolrl.rewards.step_classifier import StepClassifier
from toolrl.trajectory import Trajectory

KINDS = {"sequence": AutoModelForSequenceClassification, "token": AutoModelForTokenClassification}


def options(folder: Path | str, **changed: Any) -> PrmOptions:
    defaults: dict[str, Any] = {"share": 1.0, "batch_size": 3, "device": "cpu", "dtype": "float32", "workers": 1}
    defaults |= {"cpu_threads": 1, "gpus": 1.0, "label": -1, "step_token": None, "aggregate": "last", "per": "turn"}
    return PrmOptions(model=str(folder), **(defaults | changed))


def save(folder: Path, kind: str, config: Any, tokenizer: Any) -> Path:
    torch.manual_seed(0)
    KINDS[kind].from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def classifier(labels: int, vocabulary: int, longest: int, pad: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.5,
        num_labels=labels,
        max_position_embeddings=longest,
        pad_token_id=pad,
    )


def same_vocabulary(folder: Path, kind: str, labels: int = 3, longest: int = 2048) -> Path:
    return save(folder, kind, classifier(labels, VOCABULARY_SIZE, longest, tiny().convert_tokens_to_ids(PAD)), tiny())


def other_vocabulary(folder: Path, kind: str, longest: int = 512) -> Path:
    """Its tokenizer puts special tokens around a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["[PAD]", "[CLS]", "[SEP]"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator(["What is the product of these numbers?"], trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        "[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", cls_token="[CLS]", sep_token="[SEP]")
    config = classifier(labels=2, vocabulary=300, longest=longest, pad=0)
    return save(folder, kind, config, fast)


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("policy")
    tiny().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
async def episodes() -> list[Trajectory]:
    """Of one, two and three turns."""
    calls = [call(), call("17 + 24")]
    return [await play(*calls[:number], ANSWER, components=["format"]) for number in (0, 1, 2)]


def prefixes(trajectory: Trajectory) -> list[list[int]]:
    """The prompt, and all up to the end of each policy turn."""
    ids = list(trajectory.prompt_ids)
    found = [ids]
    for turn in trajectory.turns:
        ids = ids + turn.token_ids
        if turn.kind == "policy":
            found.append(ids)
    return found


@torch.no_grad()
def asked_directly(folder: Path, kind: str, ids: list[int]) -> torch.Tensor:
    """Logits of one prefix alone: of the sequence, or of its last token."""
    model = KINDS[kind].from_pretrained(folder).eval()
    logits = model(torch.tensor([ids])).logits[0]
    return logits if kind == "sequence" else logits[-1]


@pytest.mark.parametrize("kind", ["sequence", "token"])
def test_scores_are_the_classifiers_own_at_the_end_of_each_turn(
    kind: str, tmp_path: Path, policy_dir: str, episodes: list[Trajectory]
) -> None:
    folder = same_vocabulary(tmp_path / "prm", kind)
    scores = StepClassifier(options(folder, label=1), policy_dir).score(episodes)
    assert [len(each) for each in scores] == [2, 3, 4]
    for trajectory, found in zip(episodes, scores, strict=True):
        expected = [float(asked_directly(folder, kind, ids).softmax(-1)[1]) for ids in prefixes(trajectory)]
        assert found == pytest.approx(expected, abs=1e-6)
    assert len({round(score or 0, 4) for each in scores for score in each}) > 4, "the model tells them apart"


def test_a_single_label_gives_its_sigmoid_and_a_step_token_is_where_it_is_asked(
    tmp_path: Path, policy_dir: str, episodes: list[Trajectory]
) -> None:
    folder = same_vocabulary(tmp_path / "prm", "token", labels=1)
    scores = StepClassifier(options(folder, step_token="<think>"), policy_dir).score(episodes)
    step = tiny().convert_tokens_to_ids("<think>")
    ids = [*episodes[2].prompt_ids, step]
    expected = [float(asked_directly(folder, "token", ids).sigmoid()[0])]
    for turn in episodes[2].turns:
        ids += turn.token_ids + ([step] if turn.kind == "policy" else [])
        if turn.kind == "policy":
            expected.append(float(asked_directly(folder, "token", ids).sigmoid()[0]))
    assert scores[2] == pytest.approx(expected, abs=1e-6)


def test_a_sequence_classifier_with_other_tokens_reads_the_text(
    tmp_path: Path, policy_dir: str, episodes: list[Trajectory]
) -> None:
    folder = other_vocabulary(tmp_path / "prm", "sequence")
    own = PreTrainedTokenizerFast.from_pretrained(folder)
    (scores,) = StepClassifier(options(folder), policy_dir).score([episodes[1]])
    for ids, score in zip(prefixes(episodes[1]), scores, strict=True):
        text = tiny().decode(ids, skip_special_tokens=True)
        assert END not in text and score == pytest.approx(
            float(asked_directly(folder, "sequence", own(text).input_ids).softmax(-1)[-1]), abs=1e-6
        )


def test_a_token_classifier_with_other_tokens_is_asked_where_the_turns_text_ends(
    tmp_path: Path, policy_dir: str, episodes: list[Trajectory]
) -> None:
    folder = other_vocabulary(tmp_path / "prm", "token")
    own = PreTrainedTokenizerFast.from_pretrained(folder)
    (scores,) = StepClassifier(options(folder), policy_dir).score([episodes[1]])
    texts = [tiny().decode(ids, skip_special_tokens=True) for ids in prefixes(episodes[1])]
    read = own(texts[-1], return_offsets_mapping=True)
    places = [max(i for i, (_, end) in enumerate(read.offset_mapping) if 0 < end <= len(text)) for text in texts]
    with torch.no_grad():
        model = AutoModelForTokenClassification.from_pretrained(folder).eval()
        logits = model(torch.tensor([read.input_ids])).logits[0].softmax(-1)
    assert scores == pytest.approx([float(logits[place, -1]) for place in places], abs=1e-6)


@pytest.mark.parametrize("make", [same_vocabulary, other_vocabulary])
def test_of_what_is_too_long_the_beginning_is_left_out(
    make: Any, tmp_path: Path, policy_dir: str, episodes: list[Trajectory]
) -> None:
    long = episodes[2]
    scorer = StepClassifier(options(make(tmp_path / "prm", "token", longest=40)), policy_dir)
    (scores,) = scorer.score([long])
    assert scores[:2] == [None, None] and scores[-1] is not None
    (scores,) = StepClassifier(options(make(tmp_path / "whole", "sequence", longest=40)), policy_dir).score([long])
    assert None not in scores


def test_what_is_no_classifier_is_refused(tmp_path: Path, policy_dir: str) -> None:
    folder = same_vocabulary(tmp_path / "prm", "sequence")
    for wrong, said in [
        (options(tmp_path), "no folder in Hugging Face format"),
        (options(folder, label=3), "has 3 labels"),
        (options(folder, step_token="two words"), "must be one token"),
    ]:
        with pytest.raises(UserError, match=said):
            StepClassifier(wrong, policy_dir)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("Qwen3ForSequenceClassification", "Qwen3ForCausalLM"))
    with pytest.raises(UserError, match="Qwen3ForCausalLM"):
        StepClassifier(options(folder), policy_dir)
    with pytest.raises(UnknownName):
        step_scorer(options("no.such.module:scorer"), policy_dir)


class Halves:
    """A scorer of the user's own, which cannot read trajectories of two turns."""

    def score(self, trajectories: list[Trajectory]) -> list[list[float | None]]:
        if any(len(each.policy_turns) == 2 for each in trajectories):
            raise RuntimeError("two turns")
        return [[None] + [0.5] * len(each.policy_turns) for each in trajectories]


def own_scorer(chosen: PrmOptions, policy_dir: str) -> StepScorer:
    return Halves()  # type: ignore[return-value]


async def test_a_trajectory_that_the_model_fails_on_costs_its_own_reward_alone(
    policy_dir: str, episodes: list[Trajectory]
) -> None:
    worker = RewardWorker(options(f"{__name__}:own_scorer"), policy_dir, None)
    await worker.start()
    assert await worker._scored(episodes) == [[None, 0.5], None, [None, 0.5, 0.5, 0.5]]
    assert await worker._scored([]) == []
