"""What the guards of a run saw, did, and what came of it, in plain sentences; and which rules came near without firing.

Read from the run's folder alone (settings, journal, metrics), also while the run goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from toolrl import presets
from toolrl.config import RunConfig
from toolrl.guards import presets as guard_presets
from toolrl.guards.journal import read_journal
from toolrl.guards.replay import Closest, replay
from toolrl.guards.rule import Decision, Rule
from toolrl.monitors.metrics_log import read_metrics

ADVICE = "watch"  # what is asked of a run without guards: would this preset have told of something?


@dataclass(frozen=True)
class Told:
    """One thing that happened."""

    step: int
    kind: str  # seen, done, came_of_it, ended; or would: what a preset would have seen
    rule: str
    text: str


@dataclass(frozen=True)
class Explanation:
    """The guards' part in a run."""

    run: str
    steps: int
    preset: str | None  # that the rules were taken from for this explanation, the run having none or not those
    rules: list[str]
    told: list[Told]
    near: list[Closest]  # did not fire, and came near or beyond for too short
    blind: list[Closest]  # whose metric never had a value

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **{name: getattr(self, name) for name in ("run", "steps", "preset", "rules")},
            "told": [asdict(each) for each in self.told],
            "near": [
                {"rule": each.rule.name, "metric": each.rule.metric, "step": each.step, "level": each.level}
                | {"limit": each.limit, "share": each.share, "held": each.held, "hold": each.rule.hold}
                for each in self.near
            ],
            "blind": {each.rule.name: each.rule.metric for each in self.blind},
        }


def explain(run_dir: Path, preset: str | None = None) -> Explanation:
    """The story of a run.

    Args:
        preset: of guards: what its rules would have seen, in the place of what the run's own did.

    Raises:
        ConfigError: no such preset, or settings in the folder that this version does not read.
    """
    config = presets.load(str(run_dir / "config.yaml"), [])
    rows = read_metrics(run_dir)
    rules = guard_presets.rules(config)
    if preset is None and not rules:
        preset = ADVICE
    if preset is not None:
        rules = _rules_of(config, preset)
    would, closest = replay(rules, rows)
    told = [_would(each) for each in would] if preset else [_told(entry) for entry in read_journal(run_dir)]
    fired = {each.rule for each in told}
    near = [each for each in closest if each.is_near and each.rule.name not in fired]
    blind = [each for each in closest if rows and each.seen == 0]
    near.sort(key=lambda each: -each.share)
    steps = int(rows[-1]["step"]) if rows else 0
    return Explanation(run_dir.name, steps, preset, [rule.name for rule in rules], told, near, blind)


def summary(explained: Explanation) -> str:
    """The first sentence: whether anything happened."""
    steps = f"{explained.steps} step{'' if explained.steps == 1 else 's'}"
    firings = [each for each in explained.told if each.kind in ("seen", "would")]
    counted = f"{len(firings)} time{'' if len(firings) == 1 else 's'}" if firings else ""
    if explained.preset is not None:
        what = f"would have fired {counted}" if counted else "would have told of nothing"
        return f"The guards of {explained.preset} {what} in {steps} of {explained.run}; they were not in force."
    watched = f"{len(explained.rules)} rule{'' if len(explained.rules) == 1 else 's'}"
    if not firings:
        return f"Nothing happened: none of the {watched} of {explained.run} fired in {steps}."
    last = f"the last at step {firings[-1].step}"
    return f"The {watched} of {explained.run} fired {counted} in {steps}, {last}."


def near_text(closest: Closest) -> str:
    """How near a rule came, in words."""
    if closest.share < 1:
        return f"{closest.share:.0%} of the way"
    if closest.held < closest.rule.hold:
        return f"beyond it for {closest.held} of the {closest.rule.hold} steps in a row that it takes"
    return "beyond it"


def _rules_of(config: RunConfig, preset: str) -> list[Rule]:
    config.guards.preset, config.guards.rules = preset, []
    return guard_presets.rules(config)


def _told(entry: Mapping[str, Any]) -> Told:
    sentence = {"seen": _seen, "done": _done, "came_of_it": _came_of_it, "ended": _ended}[entry["kind"]](entry)
    return Told(int(entry["step"]), str(entry["kind"]), str(entry["rule"]), sentence)


def _would(decided: Decision) -> Told:
    return Told(decided.step, "would", decided.rule, _seen(asdict(decided)))


def _seen(entry: Mapping[str, Any]) -> str:
    evidence, metric = entry["evidence"], entry["metric"]
    level, limit = _number(evidence["level"]), _number(evidence["limit"])
    what = {
        "below": f"was {level}, below {limit}",
        "above": f"was {level}, above {limit}",
        "drop_from_peak": f"fell to {level} from its peak of {_number(evidence.get('peak'))}, below {limit}",
        "rise_from_low": f"rose to {level} from its low of {_number(evidence.get('low'))}, above {limit}",
        "above_ema": f"jumped to {level} from a running mean of {_number(evidence.get('ema'))}, above {limit}",
    }[entry["condition"]]
    return f"{metric} {what}; its last values: {', '.join(map(_number, evidence['last_values']))}"


def _done(entry: Mapping[str, Any]) -> str:
    return f"{entry['action']}: {entry['text']}"


def _came_of_it(entry: Mapping[str, Any]) -> str:
    steps = int(entry["step"]) - int(entry["fired_at"])
    verdict = "the trouble is gone" if entry["is_gone"] else f"still beyond {_number(entry['limit'])}"
    moved = f"went from {_number(entry['before'])} to {_number(entry['after'])}"
    return f"in the {steps} step{'' if steps == 1 else 's'} since, {entry['metric']} {moved}: {verdict}"


def _ended(entry: Mapping[str, Any]) -> str:
    if entry["what"] == "trouble":
        return f"{entry['metric']} is back at {_number(entry['level'])}"
    return f"{entry['action']}: {entry['text']}"


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.3g}"
