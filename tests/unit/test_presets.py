"""Every preset: it loads without an error or a warning, fits the machines it says, is rendered for every launcher, and can be
planned; and whether a plan sees what does not fit a GPU."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from toolrl import placement, presets
from toolrl.app.cli import main
from toolrl.app.launch import render
from toolrl.app.launch.nodes import groups, resources
from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.planning import Layout, Rates, simulate
from toolrl.planning.hardware import estimated
from toolrl.planning.memory import fit

GPU_PRESETS = {"single-gpu-1.5b": 1, "math-4b": 8, "math-14b": 16, "agent-32b": 64}  # and their GPUs
MOUNT = ["runs_dir=/runs", "cluster.mounts=[{target: /runs, source: /srv/runs}]"]


def test_there_are_those_that_are_tested_here() -> None:
    assert set(presets.names()) == {"quickstart-cpu", *GPU_PRESETS}


@pytest.mark.parametrize("name", presets.names())
def test_a_preset_loads_without_a_warning_and_says_what_it_is(name: str) -> None:
    config, warnings = presets.load_with_warnings(name)
    assert (config.name, warnings) == (name, [])
    assert presets.description(name).endswith(".")


@pytest.mark.parametrize("name", presets.names())
def test_its_dry_run_prints_settings_and_placement(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["train", name, "--dry-run"])
    assert ended.value.code in (0, None)
    assert "Placement:" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "gpus"), GPU_PRESETS.items())
def test_a_preset_takes_the_gpus_that_it_says(name: str, gpus: int) -> None:
    config = presets.load(name)
    assert Layout.of(config).gpus == placement.needed(config, "cuda").total()["GPU"] == gpus
    there = resources(groups(presets.load(name, MOUNT)))
    assert there["GPU"] == gpus, "the described or derived nodes hold it and have no GPU too many"


@pytest.mark.parametrize("target", ["kuberay", "slurm", "compose", "ray"])
@pytest.mark.parametrize("name", presets.names())
def test_a_preset_is_rendered_for_every_launcher(name: str, target: str) -> None:
    mount = [each.replace("/srv/runs", "runs") if target == "kuberay" else each for each in MOUNT]
    rendered = render(presets.load(name, mount), target)
    assert any(f"name: {name}" in text for text in rendered.files.values())
    assert rendered.submit


@pytest.mark.parametrize("name", GPU_PRESETS)
def test_a_preset_fits_gpus_of_80_gb(name: str) -> None:
    config = presets.load(name)
    assert fit(config, "h100").problems(config) == []


@pytest.mark.parametrize("name", ["math-14b", "agent-32b"])
def test_neither_half_of_a_cluster_waits_long_for_the_other(name: str) -> None:
    config = presets.load(name)
    memory = fit(config, "h100")
    layout = replace(Layout.of(config), engine_requests=min(config.engine.max_concurrent_requests, memory.holds))
    forecast = simulate(estimated(config, "h100"), layout, steps=3, most_workers=1)
    limits = forecast.limits
    assert min(limits.values()) in (limits["engines"], limits["learner"])
    assert 0.6 < limits["engines"] / limits["learner"] < 1.2
    assert forecast.engine_idle < 0.3 and forecast.learner_idle < 0.5


# Memory ------------------------------------------------------------------------------------------------------------


def changed(name: str, *overrides: str) -> RunConfig:
    return presets.load(name, overrides)


def test_a_learner_of_less_state_or_shorter_rows_needs_less() -> None:
    def learner(*overrides: str) -> dict[str, float]:
        return fit(changed("agent-32b", *overrides), "b200").learner

    base = learner()
    assert learner("learner.ranks=48")["weights, gradients, optimiser"] == pytest.approx(
        base["weights, gradients, optimiser"] / 2
    )
    assert base["weights, gradients, optimiser"] == pytest.approx(18 * 32e9 / 24)
    assert learner("learner.sequence_parallel=8")["activations"] == pytest.approx(base["activations"] / 2)
    assert learner("learner.gradient_checkpointing=false")["activations"] > 10 * base["activations"]
    assert learner("learner.offload=true")["weights, gradients, optimiser"] == pytest.approx(6 * 32e9 / 24)
    assert base["reference"] > 0 == learner("guards.preset=watch")["reference"]  # no rule of `watch` adds KL


def test_a_learner_that_makes_room_has_the_gpu_to_itself_in_its_turn() -> None:
    one = fit(changed("single-gpu-1.5b"), "l40s")
    assert one.problems(changed("single-gpu-1.5b")) == []
    assert 25e9 < sum(one.learner.values()) < one.learner_room < 48e9 * 0.95
    with pytest.raises(UserError, match="27 GB of a learner rank, and l40s has 24 GB"):
        fit(changed("single-gpu-1.5b", "learner.offload_while_generating=never"), "l40s")
    wide = changed("single-gpu-1.5b", "model.path=Qwen/Qwen3-4B", "engine.gpu_memory_share=0.85")
    with pytest.raises(UserError, match=r"rank keeps 10 GB, and engine\.gpu_memory_share=0\.85 leaves 8 GB of h100"):
        fit(wide, "h100")


def test_what_cannot_fit_is_said_with_a_remedy() -> None:
    crowded = changed("math-14b", "learner.gradient_checkpointing=false")
    assert any(
        "a learner rank needs about" in each and "activations" in each
        for each in fit(crowded, "h100").problems(crowded)
    )
    with pytest.raises(UserError, match=r"252 GB of a learner rank.*learner\.ranks \(now 6\).*zero_stage \(now 0\)"):
        fit(changed("math-14b", "learner.zero_stage=0"), "h100")
    with pytest.raises(UserError, match=r"room for [\d,]+ tokens of keys and values.*max_context_tokens=26624"):
        fit(changed("math-14b", "engine.gpu_memory_share=0.25"), "h100")
    many = changed("math-14b", "engine.max_concurrent_requests=512", "rollout.concurrency=512")
    assert any("holds about 88 requests" in each for each in fit(many, "h100").problems(many))


def test_a_plan_counts_no_more_requests_than_an_engine_holds(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "math-4b", "--gpu", "h100", "--steps", "1", "--json", "loop.groups_per_step=32"])
    found = json.loads(capsys.readouterr().out)
    assert found["forecast"]["engine_requests"] <= found["memory"]["holds"] < 256
    assert found["memory"]["problems"] == []


def test_a_plan_without_a_gpu_says_nothing_of_memory(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(Rates(), Layout.of(presets.load("quickstart-cpu")), steps=1).gpus == 2
    with pytest.raises(SystemExit):
        main(["plan", "quickstart-cpu", "--steps", "1", "--rate", "tool.mean_s=0.1", "--json"])
    assert "memory" not in json.loads(capsys.readouterr().out)
