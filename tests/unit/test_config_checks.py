"""Combinations of settings that cannot work are refused before anything starts."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from toolrl import presets, registered_names
from toolrl.config_bounds import BOUNDS
from toolrl.config_schema import known_keys
from toolrl.errors import ConfigError

# The values that the cases below go wrong against; the preset's own are tuned from time to time.
FIXED = [
    "rollout.max_turns=5",
    "rollout.max_calls=4",
    "rollout.max_turn_tokens=64",
    "rollout.max_response_tokens=320",
    "rollout.max_context_tokens=512",
    "rollout.max_observation_tokens=48",
    "loop.groups_per_step=16",
    "loop.group_size=8",
    "learner.updates_per_batch=4",
    "cold_start.min_calls=1",
    "cold_start.max_calls=2",
    "cold_start.malformed_call_share=0.1",
    "cold_start.wrong_code_share=0.1",
]


def refused(*overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(ConfigError) as caught:
        presets.load("quickstart-cpu", [*FIXED, *overrides])
    return [(problem.key, problem.message) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("overrides", "key", "told"),
    [
        ("rollout.top_p=0.95", "rollout.top_p", "must be 1.0"),
        ("rollout.top_k=40", "rollout.top_k", "must be -1"),
        ("rollout.temperature=0", "rollout.temperature", "above 0"),
        ("rollout.max_response_tokens=512", "rollout.max_response_tokens", "leaves no room for a prompt"),
        ("rollout.max_turn_tokens=400", "rollout.max_turn_tokens", "more than rollout.max_response_tokens=320"),
        (
            "rollout.max_observation_tokens=400",
            "rollout.max_observation_tokens",
            "more than rollout.max_response_tokens",
        ),
        ("learner.tokens_per_micro_batch=256", "learner.tokens_per_micro_batch", "cannot hold the longest sequence"),
        (
            "engine.options.max_model_len=256",
            "engine.options.max_model_len",
            "less than rollout.max_context_tokens=512",
        ),
        ("rollout.max_turns=1", "rollout.max_turns", "second turn"),
        ("tools=[python,python]", "tools.1.name", "listed twice"),
        (
            "tools=[{name: calculator, timeout_s: 5, deadline_s: 5}]",
            "tools.0.deadline_s",
            "ended after tools.0.timeout_s=5",
        ),
        ("tools=[{name: calculator, deadline_s: 0}]", "tools.0.deadline_s", "above 0"),
        ("tools=[{name: calculator, mode: later}]", "tools.0.mode", "await, deferred"),
        ("rewards.late.names=[outcome]", "rewards.late.names.0", "listed twice"),
        ("rewards.late.names=[judge,judge]", "rewards.late.names.1", "listed twice"),
        ("rewards.late.deadline_s=0", "rewards.late.deadline_s", "above 0"),
        ("rewards.late.http_port=70000", "rewards.late.http_port", "65535"),
        ("rewards.late.source=mail", "rewards.late.source", "actor"),
        ("rewards.late.bootstrap=true", "rewards.late.bootstrap", "there is no critic"),
        ("critic.kind=shared", "critic.kind", "reads no values"),
        ("algorithm.advantage=steppo", "critic.kind", "reads the value of every turn"),
        (
            "algorithm.regularizers=[{name: kl, options: {weight: 0.1, place: los}}]",
            "algorithm.regularizers.0.options.place",
            "must be one of loss, reward",
        ),
        ("critic.model=/nowhere", "critic.model", "belongs to critic.kind=own"),
        ("critic.backbone_gradient=true", "critic.backbone_gradient", "belongs to critic.kind=shared"),
        ("critic.learning_rate=0", "critic.learning_rate", "above 0"),
        ("tools=[pyton]", "tools.0.name", "did you mean 'python'?"),
        ("loop.group_size=1", "loop.group_size", "at least 2"),
        ("learner.updates_per_batch=200", "learner.updates_per_batch", "= 128 trajectories cannot feed 200 updates"),
        ("learner.ranks=64", "learner.updates_per_batch", "at most 2"),
        ("algorithm.policy_loss=cpto", "algorithm.policy_loss.name", "did you mean 'ctpo'?"),
        ("algorithm.advantage=gtop", "algorithm.advantage.name", "did you mean 'gtpo'?"),
        ("algorithm.correction=tiss", "algorithm.correction.name", "did you mean 'tis'?"),
        ("algorithm.regularizers=[{name: lk, options: {weight: 1}}]", "algorithm.regularizers.0.name", "'kl'"),
        ("algorithm.regularizers=[kl]", "algorithm.regularizers.0.options.weight", "kl needs this option"),
        ("algorithm.policy_loss.options.clip_hgih=1", "algorithm.policy_loss.options.clip_hgih", "'clip_high'"),
        (
            "algorithm.policy_loss.options.rollout_logp=1",
            "algorithm.policy_loss.options.rollout_logp",
            "no such option",
        ),
        ("algorithm.advantage={name: grpo, options: {gamma: 1}}", "algorithm.advantage.options.gamma", "takes none"),
        ("algorithm.correction.options.cpa=3", "algorithm.correction.options.cpa", "'cap'"),
        ("rewards.components=[outcome,overlong]", "rewards.components.1.options.max_tokens", "needs this option"),
        ("rewards.components.1.options.penlty=1", "rewards.components.1.options.penlty", "'penalty'"),
        ("rollout.parser=hermez", "rollout.parser", "did you mean 'hermes'?"),
        ("rewards.components=[outcome,formt]", "rewards.components.1.name", "did you mean 'format'?"),
        ("rewards.components=[]", "rewards.components", "nothing is rewarded"),
        ("rewards.components=[outcome,outcome]", "rewards.components.1.name", "listed twice"),
        ("rewards.weights.formt=1", "rewards.weights.formt", "did you mean 'format'?"),
        ("tasks.kind=gym", "tasks.kind", "unknown task source"),
        ("tasks.families=[]", "tasks.families", "at least one"),
        ("tasks.families.0.weight=0", "tasks.families.0.weight", "above 0"),
        ("tools.0.failure_rate=1", "tools.0.failure_rate", "a share below 1"),
        ("learner.zero_stage=4", "learner.zero_stage", "0, 1, 2 or 3"),
        ("learner.offload=true", "learner.offload", "zero_stage=1 or higher"),
        ("learner.betas=[0.9]", "learner.betas", "two numbers"),
        ("learner.learning_rate=0", "learner.learning_rate", "above 0"),
        ("learner.learning_rate=.inf", "learner.learning_rate", "at most 1"),
        ("cold_start.min_calls=3", "cold_start.min_calls", "more than cold_start.max_calls=2"),
        ("cold_start.max_calls=9", "cold_start.max_calls", "rollout.max_calls=4"),
        ("cold_start.direct_guess_share=0.9", "cold_start.direct_guess_share", "more than 1"),
        ("cold_start.traces_path=none.jsonl", "cold_start.traces_path", "no such file"),
        ("model.dtype=bfloat16", "model.dtype", "set float32"),
        ("learner.offload_while_generating=always", "learner.offload_while_generating", "set auto"),
        ("engine.sleep_level=3", "engine.sleep_level", "1 or 2"),
        ("engine.pipeline_parallel=2", "engine.pipeline_parallel", "dies at the first request"),
        ("engine.nodes=2", "engine.nodes", "must divide engine.tensor_parallel × engine.pipeline_parallel = 1"),
        ("weights.transport=nccl", "weights.transport", "set auto"),
        ("loop.steps=0", "loop.steps", "at least 1"),
        ("name=a/b", "name", "names a folder"),
        ("name=..", "name", "names a folder"),
        ("buffer.max_staleness=-1", "buffer.max_staleness", "0 or more"),
        ("seed=-1", "seed", "0 to"),
    ],
)
def test_an_impossible_setting_is_refused_by_its_key_and_with_a_remedy(overrides: str, key: str, told: str) -> None:
    found = dict(refused(overrides))
    assert key in found, found
    assert told in found[key]


def test_rows_need_a_file_that_exists_and_hub_a_name(tmp_path: Path) -> None:
    rows = ["tasks.kind=rows", "tasks.families=[]"]
    assert dict(refused(*rows))["tasks.path"].startswith("tasks.kind=rows needs")
    assert dict(refused(*rows, "tasks.path=none.jsonl"))["tasks.path"] == "no such file"
    (tmp_path / "rows.jsonl").write_text("{}\n")
    assert presets.load("quickstart-cpu", [*rows, f"tasks.path={tmp_path}/rows.jsonl"])
    assert "tasks.families" in dict(refused("tasks.kind=rows", "tasks.path=none.jsonl"))


def test_colocated_engines_and_ranks_must_pair_up_on_the_gpus() -> None:
    with pytest.raises(ConfigError, match=r"= 2 must equal learner.ranks"):
        presets.load("single-gpu-1.5b", ["rollout.workers=2"])
    assert presets.load("single-gpu-1.5b", ["rollout.workers=2", "learner.ranks=2"])
    assert presets.load("quickstart-cpu", ["placement.mode=colocated"])
    with pytest.raises(ConfigError, match="set nccl or auto"):
        presets.load("math-4b", ["weights.transport=ipc"])


def test_a_colocated_engine_may_take_more_where_the_learner_makes_room() -> None:
    assert presets.load("single-gpu-1.5b", ["engine.gpu_memory_share=0.8"])
    with pytest.raises(ConfigError, match=r"at most 0\.7, or 0\.85 with learner\.offload_while_generating=auto"):
        presets.load("single-gpu-1.5b", ["engine.gpu_memory_share=0.8", "learner.offload_while_generating=never"])


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        (["learner.updates_per_batch=1"], "learner.updates_per_batch"),
        (["learner.updates_per_batch=3"], "learner.updates_per_batch"),
        (["tools=[]"], "tools"),
        (["tools=[{name: calculator, timeout_s: 9, deadline_s: 3}]"], "tools.0.deadline_s"),
        (["rollout.workers=64"], "rollout.workers"),
        (["engine.tensor_parallel=2"], "engine.tensor_parallel"),
    ],
)
def test_an_odd_setting_runs_with_a_warning(overrides: list[str], key: str) -> None:
    _, warnings = presets.load_with_warnings("quickstart-cpu", [*FIXED, *overrides])
    assert [warning.key for warning in warnings] == [key]
    assert warnings[0].where == "command line"


def test_a_deferred_result_needs_a_turn_that_can_use_it() -> None:
    told = refused("tools=[{name: calculator, mode: deferred}]", "rollout.max_turns=2")
    assert [key for key, _ in told] == ["tools.0.mode"] and "set 3 or more" in told[0][1]
    presets.load("quickstart-cpu", [*FIXED, "tools=[{name: calculator, mode: deferred}]", "rollout.max_turns=3"])


def test_two_mcp_servers_are_two_entries() -> None:
    servers = "tools=[{name: mcp, options: {url: 'http://a/mcp'}}, {name: mcp, options: {url: 'http://b/mcp'}}]"
    assert len(presets.load("quickstart-cpu", [*FIXED, servers]).tools) == 2


def test_import_paths_and_vllm_parsers_are_left_to_the_loader() -> None:
    config = presets.load("quickstart-cpu", ["rollout.parser=vllm:hermes", "algorithm.policy_loss=my.module:loss"])
    assert config.algorithm.policy_loss.name == "my.module:loss"


def test_each_bound_is_of_a_key_that_exists() -> None:
    keys = {key.replace(".0", ".*") for key in known_keys()} | {"learner.betas.*", "rewards.weights.*"}
    assert set(BOUNDS) <= keys


@pytest.mark.parametrize(
    ("kind", "module", "registry"),
    [
        ("tool-call parser", "toolrl.toolcalls", "toolrl.toolcalls.parser:parsers"),
        ("tool", "toolrl.tools", "toolrl.tools.protocol:tools"),
        ("reward", "toolrl.rewards", "toolrl.rewards.component:rewards"),
        ("task source", "toolrl.tasks", "toolrl.tasks.sources:sources"),
        ("advantage", "toolrl.algorithms", "toolrl.algorithms.registries:advantage_registry"),
        ("policy loss", "toolrl.algorithms", "toolrl.algorithms.registries:policy_loss_registry"),
        ("correction", "toolrl.algorithms", "toolrl.algorithms.registries:correction_registry"),
        ("regulariser", "toolrl.algorithms", "toolrl.algorithms.registries:regularizer_registry"),
        ("guard action", "toolrl.guards.actions", "toolrl.guards.actions.action:guard_actions"),
        ("critic", "toolrl.supervision.reflection", "toolrl.supervision.reflection.critic:critics"),
    ],
)
def test_names_read_from_the_sources_are_those_of_the_registry(kind: str, module: str, registry: str) -> None:
    importlib.import_module(module)  # registers every part
    home, _, attribute = registry.partition(":")
    names = getattr(importlib.import_module(home), attribute).names()
    assert names and set(names) == registered_names.registered(kind)


@pytest.mark.parametrize("kind", ["advantage", "policy loss", "correction", "regulariser", "reward", "guard action"])
def test_the_options_of_every_part_can_be_read(kind: str) -> None:
    assert all(registered_names.options(kind, name) is not None for name in registered_names.registered(kind))


def test_what_the_learner_passes_is_no_option() -> None:
    taken, required = registered_names.options("policy loss", "ctpo") or (frozenset(), frozenset())
    assert {"clip_low", "clip_high", "power", "dual_clip", "space"} == taken and not required
    taken, _ = registered_names.options("advantage", "gtpo") or (frozenset(), frozenset())
    assert {"gamma", "normalize", "discount_outcome"} <= taken and "group" not in taken


def test_families_read_from_the_sources_are_those_of_reasoning_gym() -> None:
    factory = pytest.importorskip("reasoning_gym.factory")
    assert registered_names.reasoning_gym_families() == set(factory.DATASETS)
