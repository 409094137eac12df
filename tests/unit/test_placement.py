"""What a config needs, and what is said where a machine lacks it."""

from __future__ import annotations

import time

import pytest

from toolrl import placement, presets
from toolrl.errors import ConfigError
from toolrl.placement import PlacementError

LAPTOP = {"CPU": 2.0, "GPU": 0.0}
NODE = {"CPU": 64.0, "GPU": 8.0}


def test_the_quickstart_fits_two_cores_and_no_gpu() -> None:
    plan = placement.plan(presets.load("quickstart-cpu"), LAPTOP)
    assert plan.total() == {"CPU": 2.0, "GPU": 0.0, "sandbox": 0.0}
    assert {part.name for part in plan.parts} >= {"rollout worker", "learner rank", "replay buffer", "interpreter pool"}
    assert plan.memory_gib < 8


def test_math_4b_takes_eight_gpus_and_two_of_them_learn() -> None:
    plan = placement.plan(presets.load("math-4b"), NODE)
    assert plan.total()["GPU"] == 8.0
    assert [part.count * part.gpus for part in plan.parts if part.name == "learner rank"] == [2.0]


def test_colocated_engine_and_learner_share_one_gpu() -> None:
    assert placement.plan(presets.load("single-gpu-1.5b"), {"CPU": 8, "GPU": 1}).total()["GPU"] == 1.0


@pytest.mark.parametrize(
    ("preset", "overrides", "available", "told"),
    [
        (
            "quickstart-cpu",
            ["rollout.workers=4"],
            LAPTOP,
            "CPU: needs 5 (4 × rollout worker, 1 × learner rank), there are 2",
        ),
        ("quickstart-cpu", [], {"CPU": 1}, "there is 1"),
        ("math-4b", [], {"CPU": 64, "GPU": 4}, "GPU: needs 8 (6 × rollout worker, 2 × learner rank), there are 4"),
        ("single-gpu-1.5b", [], LAPTOP, "GPU: needs 1"),
        ("quickstart-cpu", ["placement.sandbox=hosts"], {"CPU": 8}, "sandbox: needs 1 (1 × sandbox host), there are 0"),
    ],
)
def test_a_missing_resource_is_named_at_once(
    preset: str, overrides: list[str], available: dict[str, float], told: str
) -> None:
    config = presets.load(preset, overrides)
    started = time.monotonic()
    with pytest.raises(PlacementError) as caught:
        placement.plan(config, available)
    assert told in str(caught.value)
    assert time.monotonic() - started < 1.0


def test_every_missing_resource_is_named() -> None:
    with pytest.raises(PlacementError) as caught:
        placement.plan(presets.load("math-4b", ["placement.sandbox=hosts"]), {"CPU": 1})
    assert all(f"- {name}: needs" in str(caught.value) for name in ("CPU", "GPU", "sandbox"))


def test_auto_takes_gpus_where_there_are_any_and_is_checked_again_where_there_are_none() -> None:
    config = presets.load("math-4b", ["placement.device=auto"])
    assert placement.plan(config, NODE).device == "cuda"
    with pytest.raises(ConfigError, match="set float32"):  # bfloat16 is refused on the CPU that auto came to
        placement.plan(config, {"CPU": 64})


def test_the_zero_stage_splits_what_a_rank_keeps() -> None:
    needs = []
    for stage in range(4):
        plan = placement.needed(presets.load("math-4b", [f"learner.zero_stage={stage}"]), "cuda")
        needs.append(next(part.gpu_memory for part in plan.parts if part.name == "learner rank"))
    gib = [int(words.split()[1]) for words in needs]
    assert gib == sorted(gib, reverse=True) and gib[0] > gib[3]


def test_a_policy_without_python_needs_no_interpreter() -> None:
    plan = placement.needed(presets.load("quickstart-cpu", ["tools=[calculator]"]), "cpu")
    assert "interpreter pool" not in {part.name for part in plan.parts}


def test_each_sandbox_host_takes_a_unit_of_the_resource() -> None:
    config = presets.load("quickstart-cpu", ["placement.sandbox=hosts", "placement.sandbox_hosts=3"])
    assert placement.plan(config, {"CPU": 16, "sandbox": 3}).total()["sandbox"] == 3
    with pytest.raises(PlacementError, match="sandbox: needs 3 \\(3 × sandbox host\\), there are 2"):
        placement.plan(config, {"CPU": 16, "sandbox": 2})


def test_an_engine_over_two_nodes_takes_equal_shares_of_both() -> None:
    config = presets.load(
        "agent-32b", ["engine.tensor_parallel=8", "engine.pipeline_parallel=2", "engine.nodes=2", "rollout.workers=2"]
    )
    parts = {part.name: part for part in placement.needed(config, "cuda").parts}
    assert [(parts[name].count, parts[name].gpus) for name in ("rollout worker", "engine node")] == [(2, 8.0), (2, 8.0)]
    assert placement.plan(config, {"CPU": 99, "GPU": 56, "sandbox": 4}).total()["GPU"] == 2 * 16 + 24
    assert "tensor parallel 8, pipeline parallel 2, over 2 nodes" in parts["rollout worker"].note
    more = placement.missing_for_workers(config, {"CPU": 99, "GPU": 16}, "cuda")
    assert more == [f"GPU: needs 32 (2 × rollout worker, 2 × engine node), there are 16; {placement._REMEDY['GPU']}"]


def test_an_engine_that_no_node_holds_is_told_to_spread() -> None:
    wide = placement.needed(presets.load("agent-32b", ["engine.tensor_parallel=16"]), "cuda")
    (told,) = placement.too_large(wide, 8)
    assert told.startswith("a rollout worker takes 16 GPUs of one node, and the largest has 8; spread each engine over")
    spread = presets.load("agent-32b", ["engine.tensor_parallel=16", "engine.nodes=2"])
    assert placement.too_large(placement.needed(spread, "cuda"), 8) == []
