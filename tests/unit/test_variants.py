"""Variants for evaluation out of distribution: each changes what it says and nothing else, and answers are checked as before."""

from __future__ import annotations

import asyncio
import copy
import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest

from tests.unit.test_cold_start_traces import HereInterpreter
from toolrl import presets, registered_names, tasks, toolcalls
from toolrl.app.cold_start_solvers import programs, solvers
from toolrl.app.tiny_tokenizer import build_tokenizer
from toolrl.config import FamilyConfig, Named, RunConfig, TaskConfig, ToolConfig
from toolrl.conversation import ChatFormat
from toolrl.errors import ConfigError, UserError
from toolrl.tasks import Task, verifiers
from toolrl.tools import Toolbox
from toolrl.trajectory import ToolCall
from toolrl.variants import NotApplicable, variants
from toolrl.variants.harder_ranges import RULES

TOKENIZER = build_tokenizer()
CONFIG = presets.load("quickstart-cpu", ["tasks.held_out_tasks=12"])
# Where a variant may differ from the run.
CHANGES = {
    "renamed_tools": {"tools.0.rename.python", "tools.0.rename.python.code", "tasks.system_prompt"},
    "other_format": {"rollout.parser"},
    "reworded_prompts": {"tasks.wording"},
    "harder_ranges": {"tasks.families"},
    "tool_failures": {"tools.0.failure_rate", "tools.0.delay"},
}


class Stage:
    """What a rollout worker makes of the settings."""

    def __init__(self, config: RunConfig) -> None:
        self.toolbox = Toolbox.build(config.tools, interpreter=HereInterpreter(), seed=config.seed)
        self.parser = toolcalls.get(config.rollout.parser)
        self.chat = ChatFormat(TOKENIZER, tools=self.toolbox.schemas, parser=self.parser)
        self.source = tasks.build(config.tasks, config.seed)

    def prompt(self, task: Task) -> str:
        return str(TOKENIZER.decode(self.chat.prompt_ids(task.messages)))


def varied(name: str, config: RunConfig = CONFIG, **options: Any) -> RunConfig:
    return variants.get(name)(config, **options).config


def flat(tree: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    if not items:
        yield key, tree
    for part, inner in items:
        yield from flat(inner, f"{key}.{part}".lstrip("."))


def numbers(text: str) -> list[str]:
    return re.findall(r"\d+(?:\.\d+)?", text)


@pytest.mark.parametrize("name", variants.names())
def test_a_variant_changes_only_what_it_says_and_leaves_the_runs_settings_alone(name: str) -> None:
    before = copy.deepcopy(CONFIG)
    made = variants.get(name)(CONFIG)
    assert made.what and made == variants.get(name)(CONFIG)
    assert before == CONFIG
    own, other = dict(flat(asdict(CONFIG))), dict(flat(asdict(made.config)))
    changed = {key for key in own.keys() | other.keys() if own.get(key, {}) != other.get(key, {})}
    assert changed
    assert all(any(key.startswith(allowed) for allowed in CHANGES[name]) for key in changed), changed


def test_every_variant_is_in_the_config_by_default() -> None:
    assert sorted(part.name for part in RunConfig().eval.ood) == variants.names() == sorted(CHANGES)
    assert registered_names.registered("evaluation variant") == set(variants.names())
    assert registered_names.options("evaluation variant", "tool_failures") == ({"more", "delay", "slower"}, frozenset())


# renamed_tools --------------------------------------------------------------------------------------------------------


async def test_renamed_tools_are_renamed_in_prompt_schema_and_calls_and_still_run() -> None:
    config = varied("renamed_tools", replace(CONFIG, tools=[ToolConfig("python"), ToolConfig("calculator")]))
    stage = Stage(config)
    shown = stage.prompt(stage.source.held_out()[0])
    assert "Use run_code." in shown and "run_code(source)" in shown and "compute(formula)" in shown
    assert not re.search(r"\b(python|code|calculator|expression)\b", shown)
    written = stage.parser.render([ToolCall("call_0", "run_code", {"source": "x = 6\nprint(x * 7)"})])
    (read,) = stage.parser.parse(written).calls
    async with stage.toolbox.session("e") as tools:
        ran = await tools.call(read)
        assert (ran.status, ran.text, ran.name) == ("ok", "42", "run_code")
        assert (await tools.call(ToolCall("c", "compute", {"formula": "6 * 7"}))).text == "42"
        old = await tools.call(ToolCall("c", "python", {"code": "print(1)"}))
        assert old.status == "invalid_call" and "run_code" in old.text
        wrong = await tools.call(ToolCall("c", "run_code", {"code": "print(1)"}))
        assert wrong.status == "invalid_call" and "source" in wrong.text


def test_a_renamed_tool_keeps_the_promises_of_the_tool() -> None:
    python = Toolbox.build([ToolConfig("python")], interpreter=HereInterpreter(), seed=0)._tools["python"]
    renamed = Stage(varied("renamed_tools")).toolbox._tools["run_code"]
    for promise in ("keeps_own_deadline", "frees_when_parked"):
        assert getattr(renamed, promise) is getattr(python, promise) is True
    assert renamed.timeout_s == CONFIG.tools[0].timeout_s


def test_what_the_run_renames_already_is_renamed_again() -> None:
    tools = [ToolConfig("python", rename={"python": "execute"})]
    own = replace(CONFIG, tools=tools, tasks=replace(CONFIG.tasks, system_prompt="Use execute. Python 3."))
    config = varied("renamed_tools", own)
    assert config.tasks.system_prompt == "Use run_code. Python 3."
    assert [schema["function"]["name"] for schema in Stage(config).toolbox.schemas] == ["run_code"]


def test_system_prompts_that_rows_bring_along_are_renamed_too(tmp_path: Any) -> None:
    row = '{"prompt": [{"role": "system", "content": "Use python."}, {"role": "user", "content": "A python is %d m long?"}]'
    lines = [row % number + f', "reward_model": {{"ground_truth": "{number}"}}}}' for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    own = replace(CONFIG, tasks=TaskConfig(kind="rows", path=str(tmp_path / "rows.jsonl"), held_out_tasks=2))
    for task in tasks.build(varied("renamed_tools", own).tasks, 0).held_out():
        assert task.messages[0]["content"] == "Use run_code." and "A python is" in task.question


def test_names_of_other_tools_are_given_and_wrong_ones_are_refused() -> None:
    own = replace(CONFIG, tools=[ToolConfig("tests.unit.test_tools_toolbox:Counter")])
    with pytest.raises(NotApplicable, match=r"names of their own.*options"):
        varied("renamed_tools", own)
    config = varied("renamed_tools", own, names={"counter": "tally", "counter.what": "which"})
    (schema,) = Stage(config).toolbox.schemas
    assert (schema["function"]["name"], list(schema["function"]["parameters"]["properties"])) == ("tally", ["which"])
    for names, message in (
        ({"conter": "tally"}, "did you mean 'counter'"),
        ({"counter.wht": "which"}, "did you mean 'what'"),
    ):
        with pytest.raises(UserError, match=message):
            Stage(varied("renamed_tools", own, names=names))


# other_format ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("own", "other"), [("hermes", "tagged"), ("fenced", "hermes"), ("vllm:llama3_json", "hermes")])
def test_another_format_is_told_and_read(own: str, other: str) -> None:
    config = varied("other_format", replace(CONFIG, rollout=replace(CONFIG.rollout, parser=own)))
    assert config.rollout.parser == other
    stage = Stage(config)
    call = ToolCall("call_0", "python", {"code": "print(1)"})
    assert stage.parser.parse(stage.parser.render([call])).calls == [call]
    if other == "tagged":
        assert stage.parser.instructions in stage.prompt(stage.source.held_out()[0])
        assert toolcalls.get("hermes").instructions not in stage.prompt(stage.source.held_out()[0])
        assert not stage.parser.parse(toolcalls.get("hermes").render([call])).calls


def test_another_format_is_the_one_asked_for_and_never_the_runs_own() -> None:
    assert varied("other_format", parser="fenced").rollout.parser == "fenced"
    with pytest.raises(UserError, match="the format of the run itself"):
        varied("other_format", parser="vllm:hermes")
    with pytest.raises(UserError, match="only call python"):
        varied("other_format", replace(CONFIG, tools=[ToolConfig("calculator")]), parser="tagged")


# reworded_prompts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", solvers.names())
def test_a_reworded_question_asks_the_same(family: str) -> None:
    """Its numbers stand as they stood, and the solver, which reads the question alone, finds the same programs."""
    own = replace(CONFIG, tasks=TaskConfig(families=[FamilyConfig(family)], held_out_tasks=8))
    before, after = (tasks.build(c.tasks, 0).held_out() for c in (own, varied("reworded_prompts", own)))
    for old, new in zip(before, after, strict=True):
        assert new.question != old.question and new.messages[0] != old.messages[0]
        assert numbers(new.question) == numbers(old.question)
        assert programs(family, new.question, 1) == programs(family, old.question, 1)
        assert replace(new, messages=old.messages) == old


@pytest.mark.parametrize("family", sorted(RULES))
def test_no_number_of_any_familys_question_is_lost(family: str) -> None:
    config = TaskConfig(families=[FamilyConfig(family)], held_out_tasks=5)
    other = varied("reworded_prompts", replace(CONFIG, tasks=config)).tasks
    for old, new in zip(tasks.build(config, 0).held_out(), tasks.build(other, 0).held_out(), strict=True):
        assert numbers(new.question) == numbers(old.question) and new.question != old.question


def test_a_prompt_without_a_known_phrase_is_framed_and_phrases_can_be_given() -> None:
    own = replace(CONFIG, tasks=replace(CONFIG.tasks, system_prompt="Be brief."))
    framed = Stage(varied("reworded_prompts", own)).source.held_out()[0].messages[0]["content"]
    assert framed.endswith("Be brief.") and framed != "Be brief."
    given = Stage(varied("reworded_prompts", own, system={"Be brief": "Say little"})).source.task(3)
    assert given.messages[0]["content"] == "Say little."
    with pytest.raises(UserError, match="empty or stays"):
        varied("reworded_prompts", own, question={"x": "x"})


# harder_ranges --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(RULES))
def test_harder_ranges_lie_beyond_the_runs_own_and_answers_are_checked(family: str) -> None:
    own = replace(CONFIG, tasks=TaskConfig(families=[FamilyConfig(family)], held_out_tasks=6))
    config = varied("harder_ranges", own)
    moved = config.tasks.families[0].options
    for rule in RULES[family]:
        assert moved[rule.low] > dict(defaults(family))[rule.high] and moved[rule.high] >= moved[rule.low]
    check = verifiers.load("reasoning_gym")
    held_out = tasks.build(config.tasks, 0).held_out()
    assert len(held_out) == 6
    for task in held_out:
        assert check(str(task.ground_truth), task.ground_truth, task.details) == 1.0
        assert check("-17", task.ground_truth, task.details) < 1.0


def defaults(family: str) -> dict[str, Any]:
    from toolrl.variants.harder_ranges import _defaults

    return _defaults(family)


def test_ranges_are_given_for_families_without_a_rule() -> None:
    own = replace(CONFIG, tasks=TaskConfig(families=[FamilyConfig("number_sorting"), FamilyConfig("gcd")]))
    with pytest.raises(NotApplicable, match="no rule for number_sorting; give ranges"):
        varied("harder_ranges", own)
    given = varied("harder_ranges", own, ranges={"number_sorting": {"min_numbers": 11, "max_numbers": 12}})
    assert given.tasks.families[0].options == {"min_numbers": 11, "max_numbers": 12}
    assert given.tasks.families[1].options == {"min_value": 1001, "max_value": 10000}
    with pytest.raises(UserError, match="no task family 'gdc'; did you mean 'gcd'"):
        varied("harder_ranges", own, ranges={"number_sorting": {}, "gdc": {}})


# tool_failures --------------------------------------------------------------------------------------------------------


async def test_tools_fail_more_often_and_the_same_calls_fail_again() -> None:
    async def failures(config: RunConfig) -> list[bool]:
        box = Stage(config).toolbox
        async with box.session("e") as tools:
            calls = [ToolCall(f"call_{n}", "python", {"code": "print(1)"}) for n in range(300)]
            return [(await tools.call(call)).injected for call in calls]

    own, worse = await failures(CONFIG), await failures(varied("tool_failures", slower=False))
    assert sum(own) / 300 == pytest.approx(0.2, abs=0.07)
    assert sum(worse) / 300 == pytest.approx(0.5, abs=0.08)
    assert all(now for before, now in zip(own, worse, strict=True) if before)


async def test_a_wait_as_long_as_the_tools_limit_is_a_timeout_and_a_shorter_one_is_told() -> None:
    async def result(mean_s: float, timeout_s: float) -> Any:
        tools = [ToolConfig("calculator", timeout_s=timeout_s, rename={"calculator": "sums"})]
        config = varied(
            "tool_failures", replace(CONFIG, tools=tools), more=0.01, delay={"mean_s": mean_s, "p99_s": mean_s}
        )
        async with Toolbox.build([replace(config.tools[0], failure_rate=0.0)], None, 0).session("e") as session:
            return await session.call(ToolCall("call_0", "sums", {"expression": "6 * 7"}))

    slow, fast = await result(30.0, 0.02), await result(0.02, 5.0)
    assert (slow.status, slow.text) == ("timeout", "Error: sums did not finish within 0.02 s")
    assert (fast.status, fast.text) == ("ok", "42") and fast.wall_s >= 0.02


async def test_overlapping_calls_of_a_slow_tool_run_in_the_order_in_which_they_came() -> None:
    tools = [ToolConfig("python", delay={"mean_s": 0.01, "p99_s": 0.05})]
    async with Toolbox.build(tools, HereInterpreter(), 0).session("e") as session:
        calls = [ToolCall(f"call_{n}", "python", {"code": f"x = [*globals().get('x', []), {n}]"}) for n in range(8)]
        await asyncio.gather(*map(session.call, calls))
        shown = await session.call(ToolCall("call_8", "python", {"code": "print(x)"}))
    assert shown.text == "[0, 1, 2, 3, 4, 5, 6, 7]"


# Not applicable, not allowed ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "change", "why"),
    [
        ("renamed_tools", {"tools": []}, "no tools"),
        ("renamed_tools", {"rollout": replace(CONFIG.rollout, parser="tagged")}, "names neither tool nor argument"),
        ("other_format", {"tools": []}, "no calls to write"),
        ("other_format", {"tools": [ToolConfig("search")]}, "no other format.*vllm:NAME"),
        ("harder_ranges", {"tasks": TaskConfig(kind="rows")}, "kind=rows has no ranges"),
        ("tool_failures", {"tools": []}, "no tools"),
        ("tool_failures", {"tools": [ToolConfig(failure_rate=0.97)]}, "already fails as often"),
    ],
)
def test_a_variant_that_cannot_apply_says_why(name: str, change: dict[str, Any], why: str) -> None:
    with pytest.raises(NotApplicable, match=why):
        varied(name, replace(CONFIG, **change))


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["eval.ood=[renamed_tool]"], "did you mean 'renamed_tools'"),
        (["eval.ood=[other_format, other_format]"], "listed twice"),
        (["eval.ood=[{name: other_format, options: {parsr: fenced}}]"], "did you mean 'parser'"),
        (["loop.eval_ood=true", "eval.ood=[]"], "names no variant"),
        (["loop.eval_ood=true", "tasks.held_out_tasks=0"], "no held-out tasks"),
        (["rollout.parser=tagged", "tools.0.rename={python: run}"], "writes code without names"),
        (["tools.0.delay={mean_s: 1.0}"], "needs mean_s and p99_s"),
        (["tasks.wording.question_frame=Think"], "prompt would be lost"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_to_do(settings: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)):
        presets.load("quickstart-cpu", settings)


def test_variants_and_their_options_come_from_a_file(tmp_path: Any) -> None:
    config = presets.load(
        "quickstart-cpu", ["eval.ood=[reworded_prompts, {name: other_format, options: {parser: fenced}}]"]
    )
    assert config.eval.ood == [Named("reworded_prompts"), Named("other_format", {"parser": "fenced"})]
    (tmp_path / "run.yaml").write_text(presets.to_yaml(config))
    assert presets.load(str(tmp_path / "run.yaml")) == config
