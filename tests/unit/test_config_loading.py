"""Reading configs: presets, files, overrides; every mistake is told with key, value, place and remedy."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolrl import config_reference, presets
from toolrl.config import RunConfig
from toolrl.config_schema import known_keys
from toolrl.errors import ConfigError

DOC = Path(__file__).parents[2] / "docs" / "config.md"


def written(tmp_path: Path, text: str, name: str = "run.yaml") -> str:
    path = tmp_path / name
    path.write_text(text)
    return str(path)


def fault(source: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        presets.load(source, overrides)
    return str(caught.value)


@pytest.mark.parametrize("name", presets.names())
def test_each_preset_loads_without_a_warning_and_bears_its_name(name: str) -> None:
    config, warnings = presets.load_with_warnings(name)
    assert (config.name, warnings) == (name, [])
    assert presets.description(name)


def test_the_presets_of_the_issue_are_there() -> None:
    assert set(presets.names()) >= {"quickstart-cpu", "math-4b", "single-gpu-1.5b"}


@pytest.mark.parametrize("name", presets.names())
def test_a_resolved_config_reads_back_equal(name: str, tmp_path: Path) -> None:
    config = presets.load(name, ["seed=7", "tools.0.failure_rate=0.25"])
    assert presets.load(written(tmp_path, presets.to_yaml(config))) == config


def test_an_unknown_key_in_a_file_is_told_with_its_line_and_the_nearest_key(tmp_path: Path) -> None:
    path = written(tmp_path, "base: quickstart-cpu\nloop:\n  steps: 3\n  group_sise: 4\n")
    assert fault(path) == f"{path}:4: loop.group_sise: unknown key; did you mean 'loop.group_size'?"


def test_every_mistake_of_a_file_is_told_at_once(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "base: quickstart-cpu\nmodel:\n  dtype: float31\nloop: {steps: many}\n"
        "tools:\n  - name: python\n    tmeout_s: 3\n",
    )
    lines = fault(path).splitlines()
    assert len(lines) == 3
    assert f"{path}:3: model.dtype = 'float31': must be one of float32, bfloat16; did you mean 'float32'?" in lines
    assert f"{path}:4: loop.steps = 'many': must be a whole number, not a text" in lines
    assert f"{path}:7: tools.0.tmeout_s: unknown key; did you mean 'tools.0.timeout_s'?" in lines


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("steps=3", "did you mean 'loop.steps'?"),
        ("lr=3", "lr: unknown key"),
        ("loop.stepps=3", "did you mean 'loop.steps'?"),
        ("learner.zero_stag=1", "did you mean 'learner.zero_stage'?"),
        ("tools.0.failur_rate=0.1", "did you mean 'tools.0.failure_rate'?"),
        ("tasks.families.2.weight=1", "tasks.families.2.name = ''"),
        ("tasks.families.7.weight=1", "there are only 2 items; the next is tasks.families.2"),
        ("tasks.families.one.weight=1", "unknown key"),
        ("loop.steps=2.5", "loop.steps = 2.5: must be a whole number, not a fraction"),
        ("loop.steps=true", "must be a whole number, not true/false"),
        ("learner.offload=1", "must be true or false"),
        ("loop.steps.deep=1", "unknown key"),
        ("loop=3", "must be a block"),
        ("tools=3", "must be a list"),
        ("loop.steps=null", "loop.steps = None: must be a whole number"),
        ("model.dtype=bf16", "must be one of float32, bfloat16; did you mean 'bfloat16'?"),
        ("loop.steps", "write key=value"),
        ("=3", "write key=value"),
        ("name=[", "cannot be read as a value"),
        ("name=${nowhere.at.all}", "nowhere"),
    ],
)
def test_a_wrong_override_is_told_with_key_value_and_remedy(override: str, told: str) -> None:
    message = fault("quickstart-cpu", "tasks.families=[chain_sum,gcd]", override)
    assert told in message
    assert "command line" in message or "nowhere" in message


def test_an_unknown_preset_names_the_nearest() -> None:
    assert "did you mean 'quickstart-cpu'?" in fault("quickstart")
    assert "no such file: nothing/here.yaml" in fault("nothing/here.yaml")


def test_overrides_reach_into_lists_and_append_to_them() -> None:
    config = presets.load(
        "quickstart-cpu",
        [
            "tools.0.timeout_s=4",
            "tasks.families.0.options={max_terms: 2}",
            "tasks.families.0.weight=2",
            "tools.0.failure_rate=0.5",
            "tools.1=calculator",
            "tools.1.timeout_s=1",
        ],
    )
    assert config.tasks.families[0].weight == 2.0
    assert config.tasks.families[0].options["max_terms"] == 2  # the rest of the item stays
    assert [(tool.name, tool.failure_rate, tool.timeout_s) for tool in config.tools] == [
        ("python", 0.5, 4.0),
        ("calculator", 0.0, 1.0),
    ]
    assert presets.load("quickstart-cpu", ["learner.betas.1=0.95"]).learner.betas == [0.9, 0.95]


def test_a_bare_name_stands_for_a_named_part() -> None:
    config = presets.load("quickstart-cpu", ["algorithm.policy_loss=token", "rewards.components=[outcome]"])
    assert config.algorithm.policy_loss.name == "token"
    assert [part.name for part in config.rewards.components] == ["outcome"]


def test_another_name_drops_the_options_of_the_former_part(tmp_path: Path) -> None:
    path = written(tmp_path, "base: quickstart-cpu\nalgorithm: {policy_loss: {name: ctpo, options: {power: 0.0}}}\n")
    assert presets.load(path).algorithm.policy_loss.options == {"power": 0.0}
    assert presets.load(path, ["algorithm.policy_loss=token"]).algorithm.policy_loss.options == {}
    assert presets.load(path, ["algorithm.policy_loss.name=token"]).algorithm.policy_loss.options == {}
    below = written(tmp_path, "base: run.yaml\nalgorithm: {policy_loss: token}\n", "below.yaml")
    assert presets.load(below).algorithm.policy_loss.options == {}
    assert presets.load(path, ["algorithm.policy_loss.options.dual_clip=null"]).algorithm.policy_loss.options == {
        "power": 0.0,
        "dual_clip": None,
    }


def test_an_optional_part_can_be_switched_off_and_on() -> None:
    assert presets.load("quickstart-cpu", ["algorithm.correction=null"]).algorithm.correction is None
    back = presets.load("quickstart-cpu", ["algorithm.correction=null", "algorithm.correction=tis"])
    assert back.algorithm.correction is not None and back.algorithm.correction.name == "tis"


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    path = written(tmp_path, "base: quickstart-cpu\nlearner: {learning_rate: 3e-5}\n")
    assert presets.load(path).learner.learning_rate == 3e-5
    assert presets.load(path, ["learner.learning_rate=2e-6"]).learner.learning_rate == 2e-6


def test_a_file_builds_on_a_preset_or_on_a_file_beside_it(tmp_path: Path) -> None:
    written(tmp_path, "base: quickstart-cpu\nname: lower\nseed: 5\n", "lower.yaml")
    upper = presets.load(written(tmp_path, "base: lower.yaml\nname: upper\n", "upper.yaml"))
    assert (upper.name, upper.seed, upper.model.path) == ("upper", 5, "tiny:qwen3")


def test_files_that_name_each_other_as_base_are_refused(tmp_path: Path) -> None:
    written(tmp_path, "base: b.yaml\n", "a.yaml")
    path = written(tmp_path, "base: a.yaml\n", "b.yaml")
    assert "in a circle" in fault(path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("- a\n- b\n", "must hold `key: value` lines"),
        ("loop: {steps: 3\n", "not valid YAML"),
        ("loop:\n  steps: 3\n  steps: 4\n", "not valid YAML"),
        ("just words\n", "must hold `key: value` lines"),
        ("a: b: c\n", "run.yaml:1"),
    ],
)
def test_a_file_that_is_no_config_is_refused_with_its_line(text: str, told: str, tmp_path: Path) -> None:
    assert told in fault(written(tmp_path, text))


def test_a_folder_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    assert "no such file" in fault(str(tmp_path))


def test_the_line_of_the_file_is_told_for_a_value_that_only_a_check_refuses(tmp_path: Path) -> None:
    path = written(tmp_path, "base: quickstart-cpu\nloop:\n  steps: 3\nrollout:\n  top_p: 0.9\n")
    assert fault(path).startswith(f"{path}:5: rollout.top_p = 0.9: must be 1.0")


def test_a_value_that_the_command_line_overrides_is_not_blamed_on_the_file(tmp_path: Path) -> None:
    path = written(tmp_path, "base: quickstart-cpu\nrollout:\n  top_p: 1.0\n")
    assert fault(path, "rollout.top_p=0.9").startswith("command line: rollout.top_p = 0.9")


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(known_keys())) | st.text(max_size=12),
    st.text(max_size=12)
    | st.sampled_from(["null", "{}", "[]", "[{}]", "-1", "1e400", "nan", "{a: 1}", "!!python/x 1"]),
)
def test_any_override_is_taken_or_refused_in_words(key: str, value: str) -> None:
    try:
        config = presets.load("quickstart-cpu", [f"{key}={value}"])
    except ConfigError as error:
        assert str(error)
    else:
        assert isinstance(config, RunConfig)


def test_every_setting_has_a_row_in_the_reference() -> None:
    listed = {key.name for key in config_reference.all_keys()}
    leaves = {key for key in known_keys() if not any(other.startswith(key + ".") for other in known_keys())}
    named = {key for key in leaves if ".0." not in key or key.split(".0.")[0] in ("tools", "tasks.families")}
    parts = {
        key.rsplit(".", 1)[0] for key in named if key.endswith((".name", ".options")) and key.startswith("algorithm")
    }
    assert {key for key in named if key.rsplit(".", 1)[0] not in parts} <= listed
    assert parts <= listed


def test_the_table_in_the_docs_is_that_of_the_settings() -> None:
    assert config_reference.markdown() in DOC.read_text(), (
        "run `toolrl config keys --markdown` and put it into docs/config.md"
    )
