"""Advantages of a whole batch: by group as before, or at once from evidence; and the answers that a teacher is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from learner.sequence import sequences_from
from tests.episodes import tiny
from tests.unit.chat_templates import TOOLS, templates, tokenizer_for
from toolrl import tasks
from toolrl.algorithms import advantages, group_advantages
from toolrl.algorithms.batch_advantages import batch_advantages
from toolrl.app.answer_hints import AnswerHints, hinted_messages
from toolrl.config import TaskConfig
from toolrl.conversation import ChatFormat
from toolrl.errors import UserError
from toolrl.tasks import Task
from toolrl.trajectory import Outcome, ToolCall, ToolResult, Trajectory, Turn


def policy(*ids: int) -> Turn:
    return Turn("policy", list(ids), [-0.5] * len(ids), [0] * len(ids))


def played(
    name: str, reward: float, turns: int = 2, outcome: Outcome = Outcome.ANSWERED, group: str = "g"
) -> Trajectory:
    made = [policy(*range(5, 7 + turn)) for turn in range(turns)]
    return Trajectory(name, group, "task", 0, [1, 2], made, outcome=outcome, rewards={"outcome": reward})


def batch() -> list[list[Trajectory]]:
    lost = played("lost", 1.0, outcome=Outcome.INFRA_ERROR)
    return [[played("a", 1.0), lost, played("b", 0.0, turns=3)], [played("c", 1.0, 1, group="h")]]


def test_advantages_of_groups_are_those_of_each_group() -> None:
    found = batch_advantages("gtpo", batch(), gamma=0.8)
    assert found.advantages == [row for group in batch() for row in group_advantages("gtpo", group, gamma=0.8)]
    assert not found.per_token and found.targets is None


def test_steppo_sees_the_whole_batch_and_gives_the_critic_its_targets() -> None:
    values = [[0.1, 0.2], [0.3, 0.4, 0.5], [0.6]]
    rewards = [[0, 1.0], [0, 0, 0.0], [1.0]]
    found = batch_advantages("steppo", batch(), evidence=values, gamma=0.9, lam=0.8)
    expected = advantages.steppo(rewards, values, 0.9, 0.8)
    assert found.advantages == [expected[0], [0.0, 0.0], expected[1], expected[2]]
    raw = advantages.steppo(rewards, values, 0.9, 0.8, whiten=False)
    assert found.targets == [
        pytest.approx([a + v for a, v in zip(*row, strict=True)]) for row in zip(raw, values, strict=True)
    ]


def test_per_token_advantages_are_zero_for_each_token_of_what_does_not_count() -> None:
    evidence = [[(-1.0, -1.0, 0.5)] * size for size in (5, 9, 2)]
    found = batch_advantages("gear", batch(), evidence=evidence)
    assert found.per_token and [len(row) for row in found.advantages] == [5, 5, 9, 2]
    assert found.advantages[1] == [0.0] * 5
    made = sequences_from([m for g in batch() for m in g], found.advantages, per_token=True)
    assert [sequence.trajectory_id for sequence in made] == ["a", "b", "c"]


def test_missing_evidence_and_rewards_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'steppo' needs evidence \(values\) for 3 trajectories, there is none"):
        batch_advantages("steppo", batch())
    with pytest.raises(ValueError, match="there is that of 1 trajectories"):
        batch_advantages("steppo", batch(), evidence=[[0.0]])
    sick = [[played("a", float("nan"))]]
    with pytest.raises(ValueError, match="trajectory a: reward nan"):
        batch_advantages("lambda_return", sick, evidence=[[0.0, 0.0]])


def test_a_batch_in_which_nothing_counts_has_no_advantages() -> None:
    lost = [[played("lost", 1.0, outcome=Outcome.STALE)]]
    assert batch_advantages("steppo", lost, evidence=[]).advantages == [[0.0, 0.0]]


@pytest.mark.parametrize(
    ("truth", "told"),
    [("5", "5"), (" 5 ", "5"), (5, "5"), (2.5, "2.5"), (["7", "seven"], "7")]
    + [(nothing, None) for nothing in (None, "", " ", [], True, {"program": "x"}, [{"a": 1}])],
)
def test_an_answer_is_known_where_the_ground_truth_is_text_or_a_number(truth: Any, told: str | None) -> None:
    assert Task("t", "f", [{"role": "user", "content": "?"}], truth, "math").known_answer == told


def source(folder: Path) -> Any:
    rows = [{"prompt": "What is 2 + 3?", "reward_model": {"ground_truth": "5"}}]
    path = folder / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return tasks.build(TaskConfig(kind="rows", path=str(path), held_out_tasks=0, shuffle=False), 0)


def test_the_teacher_reads_the_answer_in_the_users_message_and_the_response_as_it_was(tmp_path: Path) -> None:
    hints = AnswerHints(ChatFormat(tiny(), tools=TOOLS), source(tmp_path))
    task = hints.tasks.task(0)
    trajectory = played("g000000.0", 1.0, group="g000000")
    trajectory.task_id, trajectory.prompt_ids = task.id, hints.chat.prompt_ids(task.messages)
    (hinted,) = hints.sequences(trajectory)
    (plain,) = sequences_from([trajectory], [[0.0, 0.0]])
    assert hinted is not None
    prompt = tiny().decode(hinted.token_ids[: hinted.prompt_length])
    assert "What is 2 + 3?\n\nHint: the correct answer is 5." in prompt
    assert "Hint" not in tiny().decode(plain.token_ids)
    assert hinted.token_ids[hinted.prompt_length :].tolist() == trajectory.response_ids
    assert (hinted.policy_mask == plain.policy_mask).all()
    trajectory.task_id = "another"
    with pytest.raises(UserError, match="was played on task another"):
        hints.sequences(trajectory)


def test_each_rewritten_context_is_given_the_hint(tmp_path: Path) -> None:
    """A template that rewrites history: the second context is its own render of what was said, with the hint."""
    tokenizer = tokenizer_for(templates()["llama3_1"])
    chat = ChatFormat(tokenizer, tools=TOOLS, on_rewritten_history="split")
    assert chat.verdict == "split"
    hints = AnswerHints(chat, source(tmp_path))
    task = hints.tasks.task(0)
    called = ToolCall("call_0", "python", {"code": "2 + 3"})
    first = policy(*chat.assistant_ids("", [called]))
    first.text, first.calls = tokenizer.decode(first.token_ids), [called]
    shown = Turn("tool", [], results=[ToolResult("call_0", "python", "ok", "seen")])
    turns = [first, shown]
    shown.token_ids, shown.fresh_context = chat.split_prompt_ids(task.messages, turns), True
    trajectory = Trajectory(
        "t", "g000000", task.id, 0, chat.prompt_ids(task.messages), [*turns, policy(9, 10)], outcome=Outcome.ANSWERED
    )
    one, two = hints.sequences(trajectory)
    hinted = hinted_messages(task, "5")
    assert one is not None and two is not None
    assert one.token_ids.tolist() == chat.prompt_ids(hinted) + first.token_ids
    assert two.token_ids.tolist() == [*chat.split_prompt_ids(hinted, turns), 9, 10]
    assert two.token_ids.tolist() != [*shown.token_ids, 9, 10]
