"""Which variants are played out of distribution, with how much room, and how they stand beside the run's own distribution."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.requirements import need

need("ray")

from tests.unit.test_evaluate_subject import answered
from toolrl import presets
from toolrl.app.evaluate import engines_for, longest_context
from toolrl.app.model_folder import prepare_model
from toolrl.app.ood import OodPlan, compare
from toolrl.app.ood_table import MEASURES, ood_table
from toolrl.app.run_folder import RunFolder
from toolrl.app.viewer.ood import ood_view
from toolrl.app.viewer.view import View
from toolrl.config import Named, RunConfig
from toolrl.errors import UserError
from toolrl.tasks import build
from toolrl.trajectory import Trajectory
from toolrl.variants import Varied


def shorter(config: RunConfig, *, turns: int) -> Varied:
    """A variant of a user's own."""
    return Varied(replace(config, rollout=replace(config.rollout, max_turns=turns)), f"{turns} turns")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, Path]:
    place = tmp_path_factory.mktemp("runs")
    config = presets.load("quickstart-cpu", [f"runs_dir={place}", "tasks.held_out_tasks=6"])
    return config, prepare_model(config)


def asking(config: RunConfig, *parts: Named) -> RunConfig:
    return replace(config, eval=replace(config.eval, ood=list(parts)))


def test_a_variant_with_longer_prompts_gets_room_or_is_left_out_with_the_reason(run: tuple[RunConfig, Path]) -> None:
    config, model = run
    asked = asking(config, Named("other_format"), Named(f"{__name__}:shorter", {"turns": 3}))
    in_a_run = OodPlan.of(asked, model)
    assert [each.what for each in in_a_run.planned] == ["3 turns"]
    assert "raise rollout.max_context_tokens" in in_a_run.left_out["other_format"]
    assert in_a_run.context_tokens == 512
    by_itself = OodPlan.of(asked, model, most_context_tokens=longest_context(model))
    other = by_itself.planned[0]
    assert (other.name, other.tasks, by_itself.left_out) == ("other_format", 6, {})
    assert other.config.rollout.max_context_tokens == by_itself.context_tokens > 512
    assert other.config.rollout.max_response_tokens == config.rollout.max_response_tokens
    assert by_itself.planned[1].config.rollout.max_context_tokens == 512  # only where it is needed
    assert engines_for(asked, by_itself).rollout.max_context_tokens == by_itself.context_tokens
    assert engines_for(asked, None).rollout == asked.rollout


def test_what_cannot_apply_is_left_out_and_what_is_asked_wrongly_is_refused(run: tuple[RunConfig, Path]) -> None:
    config, model = run
    tagged = replace(config, rollout=replace(config.rollout, parser="tagged", max_context_tokens=1024))
    plan = OodPlan.of(asking(tagged, Named("renamed_tools")), model)
    assert plan.planned == [] and "names neither tool nor argument" in plan.left_out["renamed_tools"]
    for part, message in (
        (Named("harder_ranges", {"ranges": {"gcd": {"min_value": 5, "max_value": 3}}}), r"harder_ranges.*gcd.*refuses"),
        (Named(f"{__name__}:shorter", {"rounds": 3}), r"shorter.*rounds"),
        (Named("missing.module:variant"), r"cannot be imported"),
    ):
        with pytest.raises(UserError, match=message):
            OodPlan.of(asking(config, part), model)


async def test_variants_are_played_one_after_the_other_and_stand_beside_the_runs_own(
    run: tuple[RunConfig, Path],
) -> None:
    config, model = run
    plan = OodPlan.of(asking(config, Named("tool_failures"), Named("harder_ranges"), Named("other_format")), model)
    played, kept = [], {}

    async def play(settings: RunConfig, count: int) -> list[Trajectory]:
        played.append(settings)
        held_out = build(settings.tasks, settings.seed).held_out()[:count]
        return [answered(task, 0, float(number < 2)) for number, task in enumerate(held_out)]

    own = {"all": {"tasks": 6, **dict.fromkeys(MEASURES, 0.5)}, "by_family": {}}
    compared = await compare(plan, own, play, model, lambda name, episodes: kept.update({name: episodes}))
    assert played == [each.config for each in plan.planned]
    assert {name: len(episodes) for name, episodes in kept.items()} == {"tool_failures": 6, "harder_ranges": 6}
    row = compared["variants"]["harder_ranges"]
    assert row["accuracy"] == pytest.approx({"value": 1 / 3, "in_distribution": 0.5, "difference": -1 / 6})
    assert sorted(row["by_family"]) == ["chain_sum", "gcd", "products"]
    assert list(compared["left_out"]) == ["other_format"]
    assert json.loads(json.dumps(compared)) == compared


def test_one_table_shows_values_differences_and_what_was_left_out() -> None:
    def table(**measured: float) -> dict[str, Any]:
        return {"all": {"tasks": 64, **measured}, "by_family": {}}

    own = table(accuracy=0.9, tool_call_rate=1.0, calls_per_trajectory=1.25, format_validity=0.99)
    worse = table(accuracy=0.65, tool_call_rate=0.4, calls_per_trajectory=0.5, format_validity=0.99)
    compared = ood_table(own, {"renamed_tools": ("python → run", worse)}, {"other_format": "no calls"})
    console = Console(file=io.StringIO(), width=110)
    console.print(ood_view(compared))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("in distribution", "0.900", "0.650 (-0.250)", "0.400 (-0.600)", "0.500 (-0.750)", "0.990 (+0.000)"):
        assert part in shown
    assert "renamed_tools: python → run" in shown
    assert "other_format was left out: no calls" in shown


def test_a_run_shows_its_last_comparison_on_its_last_screen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = presets.load("quickstart-cpu", [f"runs_dir={tmp_path}", "name=seen"])
    folder = RunFolder.create(config)
    measured = {"tasks": 4, "reward": 0.5, **dict.fromkeys(MEASURES, 0.5)}
    table = {"all": measured, "by_family": {}}
    worse = {"all": {**measured, "accuracy": 0.25}, "by_family": {}}
    with View(config, folder) as view:
        view.evaluated(0, table)
        view.evaluated(1, {**table, "ood": ood_table(table, {"renamed_tools": ("python → run", worse)}, {})})
        view.finish([], None)
    shown = capsys.readouterr().out
    assert "Out of distribution" in shown and "0.250 (-0.250)" in shown
