"""Collapses that only a learner measures, planted in its updates: sinking likelihoods and spreading control tokens are seen by
the rules made for them, at the step of the plant or soon after, and nothing else is."""

from __future__ import annotations

import json

import pytest

from tests.requirements import need

need("deepspeed", "torch", "transformers")

from tests.integration.learner_ranks import finish, run_ranks
from tests.integration.planted_ranks import PLANTED_AT, learn_and_plant
from toolrl import presets
from toolrl.guards import Guards
from toolrl.guards import presets as guard_presets

Rows = list[dict[str, float]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Rows]:
    folder = tmp_path_factory.mktemp("planted")
    finish(run_ranks(learn_and_plant, 1, folder), folder)
    found: dict[str, Rows] = json.loads((folder / "rows.json").read_text())
    return found


def fired(preset: str, steps: Rows) -> list[tuple[int, str]]:
    guards = Guards(guard_presets.rules(presets.load("quickstart-cpu", [f"guards.preset={preset}"])))
    return [(each.step, each.rule) for row in steps for each in guards.observe(int(row["step"]), row)]


@pytest.mark.parametrize("preset", ["watch", "standard"])
def test_guards_are_quiet_while_the_learner_learns(rows: dict[str, Rows], preset: str) -> None:
    assert fired(preset, rows["none"]) == []


@pytest.mark.parametrize("preset", ["watch", "standard"])
@pytest.mark.parametrize(("plant", "rule"), [("sinking", "likelihood_sinks"), ("spreading", "control_tokens")])
def test_a_plant_is_seen_by_its_rule_and_not_before(rows: dict[str, Rows], preset: str, plant: str, rule: str) -> None:
    alarms = fired(preset, rows[plant])
    assert rule in [name for _, name in alarms]
    assert min(step for step, _ in alarms) >= PLANTED_AT
