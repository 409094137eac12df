"""Corrections that are played and checked. Real chat format, parser, tools and verifier."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from tests.corrections import FINAL, GOOD, LOST, chat, config_of, lost, seated, setup_of, times, turn
from tests.episodes import LINES, QUESTION, TASK, call, play, tiny
from tests.unit.chat_templates import templates, tokenizer_for
from toolrl.app.correcting import Corrector, Reason, Unfit
from toolrl.app.reflecting import corrected_sequences
from toolrl.app.tiny_tokenizer import END
from toolrl.config import RunConfig, ToolConfig
from toolrl.conversation import ChatFormat
from toolrl.supervision.reflection import read_correction
from toolrl.tasks import AnswerChecker
from toolrl.tools import Toolbox
from toolrl.trajectory import Trajectory


@pytest.fixture
async def checker() -> AsyncIterator[AnswerChecker]:
    async with AnswerChecker(RunConfig().tasks) as made:
        yield made


@pytest.fixture
async def failed() -> Trajectory:
    return await lost()


async def corrected(failed: Trajectory, checker: AnswerChecker, written: Any, **settings: Any) -> Trajectory:
    config = config_of(**settings)
    corrector = Corrector(config, setup_of(config), checker)
    return await corrector.corrected(failed, TASK, read_correction(json.dumps(written)))


def whole_render(trajectory: Trajectory) -> str:
    """What the chat template makes of the conversation as messages."""
    messages: list[dict[str, Any]] = list(QUESTION)
    for each in trajectory.turns:
        if each.kind == "tool":
            messages += [{"role": "tool", "content": result.text} for result in each.results]
        else:
            messages.append({"role": "assistant", "content": each.text.removesuffix(END)})
    schemas = Toolbox.build([ToolConfig("calculator"), ToolConfig(LINES)], None, 0).schemas
    return tiny().apply_chat_template(messages, tools=schemas, tokenize=False).removesuffix("\n")


async def test_a_correction_is_the_templates_whole_render_with_results_that_were_computed(
    failed: Trajectory, checker: AnswerChecker
) -> None:
    """Each call runs although the run's calculator fails nine times of ten on purpose, and `lines` delivers late."""
    two = {"turns": [turn("First.", times(), ("lines", {"expression": "3"})), turn("", times("408 - 0")), FINAL]}
    for written, results in ((GOOD, ["408"]), (two, ["408", "word word word", "408"])):
        made = await corrected(failed, checker, written)
        render = whole_render(made)
        assert tiny().decode(made.token_ids) == render
        assert tiny()(render, add_special_tokens=False).input_ids == made.token_ids
        assert [result.text for each in made.turns for result in each.results] == results
        assert made.rewards == {"outcome": 1.0} and made.answer == "408"
        (sequence,) = corrected_sequences([made])
        assert sequence.loss_mask.tolist() == sequence.policy_mask.tolist() == made.policy_mask()
        learnt = tiny().decode(sequence.token_ids[sequence.prompt_length :][sequence.loss_mask])
        assert learnt == "".join(each.text for each in made.policy_turns)
        assert all(each.text.endswith(END) for each in made.policy_turns), "it learns when to stop"


async def test_kept_turns_stay_to_the_token_and_are_not_learnt(failed: Trajectory, checker: AnswerChecker) -> None:
    made = await corrected(failed, checker, {"keep": 1, **GOOD})
    assert made.prompt_ids == failed.prompt_ids
    assert [each.token_ids for each in made.turns[:2]] == [each.token_ids for each in failed.turns[:2]]
    assert [each.id for turn in made.policy_turns for each in turn.calls] == ["call_0", "call_1"]
    assert tiny().decode(made.token_ids) == whole_render(made)
    (sequence,) = corrected_sequences([made])
    start = sum(len(each.token_ids) for each in made.turns[:2])
    assert not sequence.loss_mask[:start].any()
    assert sequence.loss_mask[start:].tolist() == made.policy_mask()[start:] and sequence.loss_mask.any()
    assert sequence.policy_mask.tolist() == made.policy_mask()


@pytest.mark.parametrize(
    "name", ["qwen2_5", "qwen3", "llama3", "deepseek_r1_distill_training", "lfm2_v2", "qwen3_5_think"]
)
async def test_a_correction_is_exact_under_other_templates(name: str, checker: AnswerChecker) -> None:
    tokenizer = tokenizer_for(templates()[name])
    config = config_of()
    setup = replace(setup_of(config), tokenizer=tokenizer)
    other = ChatFormat(tokenizer, tools=setup.toolbox.schemas, parser=setup.parser, on_rewritten_history="split")
    corrector = Corrector(config, replace(setup, chat=other), checker)
    wrong = seated(Trajectory("x", "x", TASK.id, 0, other.prompt_ids(TASK.messages)))
    thinks = other.checked.thinking == "opened"
    again = [turn("", times()), turn("", times("408 + 0")), FINAL]
    written = {"turns": [{**each, "thinking": "Hm."} if thinks else each for each in again]}
    made = await corrector.corrected(wrong, TASK, read_correction(json.dumps(written)))
    seen = other.prompt_ids([*TASK.messages, *other.history(made.turns[:-1])])
    assert seen == made.context_ids[: -len(made.turns[-1].token_ids)]
    sequences = corrected_sequences([made])
    assert len(sequences) == (1 if other.verdict == "exact" else 3)
    assert sum(int(each.loss_mask.sum()) for each in sequences) == sum(
        len(each.token_ids) for each in made.policy_turns
    )
    kept = await corrector.corrected(seated(made), TASK, read_correction(json.dumps({**written, "keep": 1})))
    learnt = sum(int(each.loss_mask.sum()) for each in corrected_sequences([kept]))
    assert learnt == sum(len(each.token_ids) for each in kept.policy_turns[1:]) and len(kept.policy_turns) == 4
    if thinks:
        with pytest.raises(Unfit, match="no_thinking"):
            await corrector.corrected(wrong, TASK, read_correction(json.dumps({"turns": again})))


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ({"turns": [turn("", times()), turn("408")]}, "unfinished"),
        ({"turns": [turn(str(n), times()) for n in range(40)] + [FINAL]}, "unfinished"),
        ({"turns": [turn("", times()), turn("long " * 250 + "\\boxed{408}")]}, "unfinished"),
        ({"turns": [FINAL]}, "too_few_calls"),
        ({"turns": [turn("", times("408")), FINAL]}, "unused_results"),
        ({"turns": [turn("It is 408.", times()), FINAL]}, "unused_results"),
        ({"turns": [turn("", times("17 *")), turn("", times()), FINAL]}, "failed_call"),
        ({"turns": [turn("", ("calculator", {"formula": "1"})), FINAL]}, "failed_call"),
        ({"turns": [turn("", ("abacus", {"expression": "1"})), FINAL]}, "failed_call"),
        ({"turns": [turn("", ("lines", {"expression": "die"})), FINAL]}, "infra"),
        ({"turns": [turn(f"Multiply.{END}", times()), FINAL]}, "control_tokens"),
        ({"turns": [turn("", times(f"17 * 24 #{END}")), FINAL]}, "control_tokens"),
        ({"turns": [turn("", times()), turn("<tool_call>{}</tool_call>\\boxed{408}")]}, "control_tokens"),
        ({"turns": [{**turn("", times()), "thinking": "</think>"}, FINAL]}, "control_tokens"),
        ({"turns": [turn("", ("lines", {"</tool_call>": "1"})), FINAL]}, "control_tokens"),
        ({"keep": 2, "turns": [FINAL]}, "kept_turns"),
        ({"keep": 9, "turns": [FINAL]}, "kept_turns"),
    ],
)
async def test_what_does_not_hold_is_not_trained(
    failed: Trajectory, checker: AnswerChecker, written: dict[str, Any], reason: str
) -> None:
    with pytest.raises(Unfit) as caught:
        await corrected(failed, checker, written)
    assert caught.value.reason == reason, str(caught.value)


async def test_kept_turns_must_give_what_they_gave(checker: AnswerChecker) -> None:
    lines = seated(await play(call("2", "lines"), LOST, chat=chat()))
    assert (await corrected(lines, checker, {"keep": 1, **GOOD})).turns[1].results[0].text == "word word"
    lines.turns[1].results[0].text = "other words"
    with pytest.raises(Unfit, match="other words") as caught:
        await corrected(lines, checker, {"keep": 1, **GOOD})
    assert caught.value.reason == "kept_turns"


async def test_a_run_may_want_less_of_a_correction(failed: Trajectory, checker: AnswerChecker) -> None:
    made = await corrected(failed, checker, {"turns": [FINAL]}, min_calls=0, must_use_results=False)
    assert len(made.turns) == 1 and made.rewards == {"outcome": 1.0}
    with pytest.raises(Unfit, match="too_few_calls"):
        await corrected(failed, checker, GOOD, min_calls=2)


def test_the_page_names_every_reason_and_its_example_is_in_the_form() -> None:
    page = (Path(__file__).parents[2] / "docs" / "supervision.md").read_text()
    table = page.partition("| `failed/REASON` |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE) == [
        "no_answer",
        "deadline",
        "malformed",
        *get_args(Reason),
    ]
    (example,) = re.findall(r"```json\n(.*)\n```", page)
    assert read_correction(example).keep == 1
