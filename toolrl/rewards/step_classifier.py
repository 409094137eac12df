"""A process reward model that is a classifier of transformers: `…ForSequenceClassification` reads the prompt and the episode up
to each turn's end by themselves, `…ForTokenClassification` reads it once and is asked at those ends.

The classifier reads the policy's token ids as they are where its tokenizer has the policy's vocabulary. Any other reads the text,
without special tokens, in its own tokens. Of what is too long for it, the beginning is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from toolrl.errors import UserError
from toolrl.rewards.prm import PrmOptions
from toolrl.trajectory import Trajectory


@dataclass(frozen=True)
class _Row:
    """What is read at once, and which scores come of it."""

    ids: list[int]
    ends: list[int]  # places in `ids` where the model is asked
    asked: list[tuple[int, int]]  # for each of them (trajectory, score: 0 of the prompt, 1 of the first policy turn, …)


def _row(ids: list[int], ends: list[int], asked: list[tuple[int, int]]) -> _Row:
    """Without the ends that were cut off."""
    kept = [(end, which) for end, which in zip(ends, asked, strict=True) if end >= 0]
    return _Row(ids, [end for end, _ in kept], [which for _, which in kept])


class StepClassifier:
    """A `StepScorer`. Made and used in one thread at a time."""

    def __init__(self, options: PrmOptions, policy_dir: str) -> None:
        """Raises UserError: no folder with a classifier, or a step token that is none of its tokens."""
        if not (Path(options.model) / "config.json").is_file():
            raise UserError(f"reward prm: model={options.model!r} is no folder in Hugging Face format (no config.json)")
        config = AutoConfig.from_pretrained(options.model, local_files_only=True)
        kinds = " ".join(config.architectures or [])
        self._by_token = "ForTokenClassification" in kinds
        if not self._by_token and "ForSequenceClassification" not in kinds:
            raise UserError(
                f"reward prm: {options.model} holds {kinds or 'no architecture'}; a …ForSequenceClassification or a "
                "…ForTokenClassification is needed, or a StepScorer of your own by import path"
            )
        self._options = options
        self._own, self._policy = (
            AutoTokenizer.from_pretrained(folder, local_files_only=True) for folder in (options.model, policy_dir)
        )
        self._reads_ids = self._own.get_vocab() == self._policy.get_vocab()
        self._after_step = self._step_ids()
        loader = AutoModelForTokenClassification if self._by_token else AutoModelForSequenceClassification
        dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
        self._model = loader.from_pretrained(options.model, local_files_only=True, dtype=dtype)
        self._model.to(options.device).eval()
        if not -config.num_labels <= options.label < config.num_labels:
            raise UserError(f"reward prm: label={options.label}, and {options.model} has {config.num_labels} labels")
        self._longest: int | None = getattr(config, "max_position_embeddings", None)
        self._own.truncation_side = "left"
        self._pad = next((each for each in (config.pad_token_id, self._own.pad_token_id) if each is not None), None)
        if self._pad is not None:
            self._model.config.pad_token_id = self._pad  # by which a sequence classifier finds the last token

    def score(self, trajectories: Sequence[Trajectory]) -> list[list[float | None]]:
        """See `StepScorer`. None where a token classifier's row was cut behind the end."""
        scores: list[list[float | None]] = [[None] * (1 + len(each.policy_turns)) for each in trajectories]
        rows = [row for index, trajectory in enumerate(trajectories) for row in self._rows(index, trajectory)]
        rows.sort(key=lambda row: len(row.ids))  # rows of one length need no padding
        size = self._options.batch_size if self._pad is not None else 1
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            for row, found in zip(batch, self._read(batch), strict=True):
                for (trajectory, place), score in zip(row.asked, found, strict=True):
                    scores[trajectory][place] = score
        return scores

    def _rows(self, index: int, trajectory: Trajectory) -> Iterator[_Row]:
        place = 0
        for number, segment in enumerate(trajectory.segments()):
            pieces = [(list(segment.prompt_ids), number == 0)]  # tokens, and whether a score is asked for at their end
            pieces += [(turn.token_ids, turn.kind == "policy") for turn in segment.turns]
            asked = [(index, place + each) for each in range(sum(ends for _, ends in pieces))]
            place += len(asked)
            yield from (self._rows_of_ids if self._reads_ids else self._rows_of_text)(pieces, asked)

    def _rows_of_ids(self, pieces: list[tuple[list[int], bool]], asked: list[tuple[int, int]]) -> Iterator[_Row]:
        longest = self._longest or 2**31
        ids: list[int] = []
        ends = []
        for tokens, asks in pieces:
            ids += tokens
            if asks:
                ids += self._after_step
                ends.append(len(ids))
        if self._by_token:
            cut = max(0, len(ids) - longest)
            yield _row(ids[cut:], [end - 1 - cut for end in ends], asked)
            return
        for end, which in zip(ends, asked, strict=True):
            upto = ids[max(0, end - longest) : end]
            yield _Row(upto, [len(upto) - 1], [which])

    def _rows_of_text(self, pieces: list[tuple[list[int], bool]], asked: list[tuple[int, int]]) -> Iterator[_Row]:
        text = ""
        ends = []
        for tokens, asks in pieces:
            text += self._policy.decode(tokens, skip_special_tokens=True)
            if asks:
                text += self._options.step_token or ""
                ends.append(len(text))
        if self._by_token:
            read = self._encoded(text, return_offsets_mapping=True)
            # Special tokens of the classifier stand at (0, 0).
            lasts = np.asarray([last or -1 for _, last in read.offset_mapping])
            places = [int(np.flatnonzero((lasts > 0) & (lasts <= end)).max(initial=-1)) for end in ends]
            yield _row(read.input_ids, places, asked)
            return
        for end, which in zip(ends, asked, strict=True):
            upto = self._encoded(text[:end]).input_ids
            yield _Row(upto, [len(upto) - 1], [which])

    def _encoded(self, text: str, **how: Any) -> Any:
        """In the classifier's own tokens, its special ones around them; the beginning is cut off where it is too long."""
        return self._own(text, truncation=self._longest is not None, max_length=self._longest, **how)

    def _step_ids(self) -> list[int]:
        if self._options.step_token is None:
            return []
        ids: list[int] = self._own.encode(self._options.step_token, add_special_tokens=False)
        if len(ids) != 1:
            raise UserError(
                f"reward prm: step_token={self._options.step_token!r} must be one token, and is {len(ids)} of "
                f"{self._options.model}"
            )
        return ids

    def _read(self, rows: Sequence[_Row]) -> list[list[float]]:
        """For each row the probabilities of the label at its ends."""
        width = max(len(row.ids) for row in rows)
        ids = torch.full((len(rows), width), self._pad or 0)
        mask = torch.zeros((len(rows), width), dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids)
            mask[index, : len(row.ids)] = 1
        device = self._options.device
        with torch.no_grad():
            logits: Any = self._model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits.float()
        chances = logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(-1)
        wanted = chances[..., self._options.label].cpu()
        if not self._by_token:
            return [[float(value)] for value in wanted]
        return [wanted[index, row.ends].tolist() for index, row in enumerate(rows)]
