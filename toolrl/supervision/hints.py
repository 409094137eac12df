"""Hints in the system message that are taken out again for the update (`hint`): HBG of arXiv 2606.26027.

A hinted trajectory is recorded as the model saw it, with the hint, and carries the prompts without it beside. The update is
on `without_hint`: the sampled tokens, to the token, after the prompt that the policy will have to do with.

    δ_t = log π_θ(y_t | x, y_<t) − log π_old(y_t | x, y_<t)                  x without the hint, on both sides
    log k_t = log π_old(y_t | h, x, y_<t) − log μ(y_t | h, x, y_<t)          with the hint h, on both sides

π_old is the trainer's, so it is read as log π_θ is: after x. Then ρ = 1 at the first optimiser step and the bounds of a policy
loss limit how far π_θ moves from the policy of before. k corrects for the gap between engine and trainer and for staleness,
so both of its sides are read after the prompt that the engine had. The ratio π_old(y|x) / μ(y|h,x) is not used: it is the
importance weight that takes the hint's effect out, and gives a token that only the hint brought about a weight near 0,
which is the token that is to be learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from toolrl.supervision.guidance import guide_details, note_guide
from toolrl.tasks import Task
from toolrl.tasks.task import Message
from toolrl.trajectory import Trajectory, Turn

ANSWER = "{answer}"


def hinted_task(task: Task, text: str) -> Task | None:
    """The task with the hint at the end of its system message, or in one of its own before the others.

    Args:
        text: `{answer}` in it stands for the task's answer; None is returned where that is not known.
    """
    if ANSWER in text:
        if task.known_answer is None:
            return None
        text = text.replace(ANSWER, task.known_answer)
    return replace(task, messages=_hinted_messages(task.messages, text))


def _hinted_messages(messages: Sequence[Message], text: str) -> list[Message]:
    first = messages[0]
    if first["role"] != "system":
        return [{"role": "system", "content": text}, *messages]
    return [{**first, "content": f"{first['content']}\n{text}"}, *messages[1:]]


def note_hint(
    trajectory: Trajectory,
    task: Task,
    prompt_ids: Callable[[Sequence[Message]], list[int]],
    split_prompt_ids: Callable[[Sequence[Message], Sequence[Turn]], list[int]],
) -> None:
    """Records the prompts without the hint: that of the task, and one for each later context of a rewritten history.

    Args:
        task: as it is without the hint.
        prompt_ids, split_prompt_ids: the chat format's.
    """
    prompts = [prompt_ids(task.messages)]
    for index, turn in enumerate(trajectory.turns):
        if turn.fresh_context:
            prompts.append(split_prompt_ids(task.messages, trajectory.turns[: index + 1]))
    note_guide(trajectory, "hint", prompts=prompts)


def without_hint(trajectory: Trajectory) -> Trajectory:
    """A hinted trajectory after the prompts that it is trained on; any other as it is. Sampled tokens stay as they are."""
    details = guide_details(trajectory)
    if details.get("by") != "hint":
        return trajectory
    first, *later = details["prompts"]
    contexts = iter(later)
    turns = [replace(turn, token_ids=next(contexts)) if turn.fresh_context else turn for turn in trajectory.turns]
    return replace(trajectory, prompt_ids=first, turns=turns)
