"""Process reflection that cannot work is refused before anything starts."""

from __future__ import annotations

import pytest

from toolrl import presets
from toolrl.app import reflecting
from toolrl.config import RunConfig
from toolrl.config_reflection_checks import _PLACES
from toolrl.errors import ConfigError
from toolrl.registry import UnknownName
from toolrl.supervision.reflection.prompt import PLACES

ENDPOINT = ["critic=chat_completions", "base_url=http://judge:8000/v1", "model=judge"]


def load(
    *reflection: str, others: tuple[str, ...] = ("buffer.drop_uniform_groups=false",)
) -> tuple[RunConfig, list[str]]:
    overrides = [f"supervision.reflection.{each}" for each in reflection]
    config, warnings = presets.load_with_warnings("quickstart-cpu", [*others, *overrides])
    return config, [problem.key for problem in warnings if "reflection" in problem.message + problem.key]


def refused(*reflection: str, others: tuple[str, ...] = ("buffer.drop_uniform_groups=false",)) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*reflection, others=others)
    return str(caught.value)


def test_it_is_off_and_an_endpoint_or_a_function_turns_it_on() -> None:
    assert load()[0].supervision.reflection.critic is None
    assert load(*ENDPOINT, "extra_body={top_k: -1}")[1] == []
    config, _ = load("critic=tests.corrections:right")
    reflecting.check(config)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        (["base_url=null"], "base_url: is missing"),
        (["base_url=judge:8000"], "is no address"),
        (["model=null"], "model's name at the endpoint"),
        (["critic=chat_completion"], "did you mean 'chat_completions'"),
        (["prompt='{transcript} {form} {hint}'"], "{hint} stands for nothing"),
        (["prompt='What now? {transcript}'"], "holds no {form}"),
        (["queue=2", "trajectories_per_step=3"], "no room for trajectories_per_step=3"),
        (["min_calls=99"], "no correction could hold"),
        (["min_calls=0"], "needs a result to use"),
        (["deadline_s=0"], "above 0"),
        (["retries=100"], "0 to 10"),
        (["temperature=3"], "0 to 2"),
        (["every_steps=0"], "critic=null switches"),
    ],
)
def test_what_cannot_work_is_refused_and_told(changed: list[str], told: str) -> None:
    assert told in refused(*ENDPOINT, *changed)


def test_the_key_is_named_and_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY", raising=False)
    assert "export it" in refused(*ENDPOINT, "api_key_env=JUDGE_KEY")
    said = refused(*ENDPOINT, "api_key_env=sk-0123456789")
    assert "never the key itself" in said and "0123456789" not in said
    said = refused(*ENDPOINT, "base_url=http://me:0123456789@judge/v1")
    assert "holds a user or password" in said and "0123456789" not in said
    monkeypatch.setenv("JUDGE_KEY", "sesame")
    config, _ = load(*ENDPOINT, "api_key_env=JUDGE_KEY")
    assert "sesame" not in str(config)


def test_failures_must_be_known_and_reach_the_learner() -> None:
    others = ("buffer.drop_uniform_groups=false", "rewards.components=[format]", "rewards.weights={}")
    assert "knows a failed trajectory by the reward `outcome`" in refused(*ENDPOINT, others=others)
    assert load(*ENDPOINT, others=("buffer.drop_uniform_groups=true",))[1] == ["buffer.drop_uniform_groups"]
    assert load(*ENDPOINT, "every_steps=100000")[1] == ["supervision.reflection.every_steps"]


def test_a_run_without_tools_must_say_that_none_are_called() -> None:
    others = ("buffer.drop_uniform_groups=false", "tools=[]", "cold_start.steps=0")
    assert "there are no tools to call" in refused(*ENDPOINT, others=others)


def test_a_critic_that_cannot_be_imported_starts_nothing() -> None:
    config, _ = load("critic=no_such_module:critic")
    with pytest.raises(UnknownName, match="no_such_module"):
        reflecting.check(config)


def test_the_places_of_a_prompt_are_known_without_torch() -> None:
    assert _PLACES == PLACES
