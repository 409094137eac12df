"""Prompts that hold the answer: what `gear`'s teacher reads instead of the prompt. The response stays as it was sampled.

The hint is plain text at the end of the last user message, rendered by the run's own chat format, so that the tokens after
it are those of any other prompt. A trajectory keeps no answer: its task is made again from the ticket's index (see
`toolrl.tasks.task`: a source's task depends on its settings, seed and index alone).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from actors.replay.records import task_index_of
from actors.worker_setup import Setup
from learner.sequence import TrainSequence
from learner.turns import bare_sequences
from toolrl.config import RunConfig
from toolrl.conversation import ChatFormat
from toolrl.errors import UserError
from toolrl.tasks import Task, TaskSource
from toolrl.trajectory import Trajectory

HINT = "\n\nHint: the correct answer is {answer}."


class AnswerHints:
    """`sequences(trajectory)`: its training sequences as the teacher reads them."""

    def __init__(self, chat: ChatFormat, tasks: TaskSource) -> None:
        self.chat, self.tasks = chat, tasks

    @classmethod
    def of(cls, config: RunConfig, model_dir: str | Path) -> AnswerHints:
        """Reads the tokenizer and the tasks, which takes seconds."""
        setup = Setup.of(config, model_dir)
        return cls(setup.chat, setup.tasks)

    def sequences(self, trajectory: Trajectory) -> list[TrainSequence | None]:
        """In the order of `sequences_from` for this trajectory, which must count; None where no answer is known.

        Raises:
            UserError: the task source gives another task than the one that was played.
        """
        task = self.tasks.task(task_index_of(trajectory.group_id))
        if task.id != trajectory.task_id:
            raise UserError(
                f"trajectory {trajectory.id} was played on task {trajectory.task_id}, the task source now gives {task.id} "
                "in its place; continue a run with the tasks it was started with"
            )
        bare = bare_sequences([trajectory])
        answer = task.known_answer
        if answer is None:
            return [None] * len(bare)
        messages = hinted_messages(task, answer)
        prompts = [self.chat.prompt_ids(messages)]
        for index, turn in enumerate(trajectory.turns):
            if turn.fresh_context:
                prompts.append(self.chat.split_prompt_ids(messages, trajectory.turns[: index + 1]))
        acted = [any(turn.token_ids for turn in segment.policy_turns) for segment in trajectory.segments()]
        prompts = [prompt for prompt, here in zip(prompts, acted, strict=True) if here]
        return [with_prompt(sequence, prompt) for sequence, prompt in zip(bare, prompts, strict=True)]


def hinted_messages(task: Task, answer: str) -> list[dict[str, Any]]:
    """The task's opening messages with the hint at the end of the user's last."""
    last = task.messages[-1]
    return [*task.messages[:-1], {**last, "content": f"{last['content']}{HINT.format(answer=answer)}"}]


def with_prompt(sequence: TrainSequence, prompt_ids: Sequence[int]) -> TrainSequence:
    """The same response after another prompt."""
    response = sequence.token_ids[sequence.prompt_length :]
    ids = np.concatenate([np.asarray(prompt_ids, dtype=np.int64), response])
    return replace(sequence, token_ids=ids, prompt_length=len(prompt_ids))
