"""The guards of a run: every rule, what each has seen, and the decisions that follow.

The loop asks twice a step: `before_learning` with the metrics of the batch alone, for the rules that may refuse to train
it, and `observe` with everything once the step is done, for all others. A rule sees each metric at one of the two.

Invariants:
- Same rules, same metrics: same decisions, across a stop (`state_dict`, `load_state_dict`) too.
- A roll-back gives every rule the checkpoint's memory of its metric, not of its firings: a rule in trouble is quiet for
  its whole cool-down from there, in which what was done can show.
- What was seen, what became of the metric, and that trouble ended go to the journal here; what an action did is written
  by whoever carries it out.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from toolrl.guards.journal import Journal, Kind
from toolrl.guards.rule import Decision, Reading, Rule, Watched, decision, read

BEFORE_LEARNING = "reject_batch"  # the action whose rules are asked before the batch is trained


class Guards:
    """The rules of one run over its metrics."""

    def __init__(self, rules: Sequence[Rule], journal: Journal | None = None) -> None:
        """Without a journal nothing is written. Raises ValueError when two rules share a name."""
        self.rules = {rule.name: rule for rule in rules}
        if len(self.rules) != len(rules):
            raise ValueError(f"two rules share a name: {sorted(rule.name for rule in rules)}")
        self._journal = journal
        self._watched = {name: Watched() for name in self.rules}
        self._step = 0  # the last that was asked about
        self._fired_at: dict[str, int] = {}  # rule -> the step at which it last fired, or whose batch it rejected
        self._blind: set[str] = set()

    def before_learning(self, step: int, metrics: Mapping[str, float]) -> list[Decision]:
        """Decisions of the rules that may reject the batch. Asked once a batch; `step` is the one it would become."""
        return self._decide(step, metrics, (r for r in self.rules.values() if r.action.name == BEFORE_LEARNING))

    def observe(self, step: int, metrics: Mapping[str, float]) -> list[Decision]:
        """Decisions of all other rules, in the order of the rules. Asked once a step, with all its metrics."""
        return self._decide(step, metrics, (r for r in self.rules.values() if r.action.name != BEFORE_LEARNING))

    def metrics(self) -> dict[str, float]:
        """`guard/RULE`: 1 where the rule fired at this step, else 0; `guards/blind`: rules that had no value."""
        fired = {f"guard/{name}": float(self._fired_at.get(name) == self._step) for name in self.rules}
        return {**fired, "guards/blind": float(len(self._blind))} if fired else {}

    @property
    def holding(self) -> frozenset[str]:
        """Rules that fired and whose metric has not come back since."""
        return frozenset(name for name, watched in self._watched.items() if watched.in_trouble)

    def watched(self, rule: str) -> Watched:
        """A copy of what a rule remembers."""
        return copy.deepcopy(self._watched[rule])

    def state_dict(self) -> dict[str, Any]:
        """All memory as JSON, for a checkpoint."""
        return {name: watched.state_dict() for name, watched in self._watched.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken. Rules that are new since begin without a memory."""
        self._watched = {name: Watched.of(state[name]) if name in state else Watched() for name in self.rules}

    def roll_back(self, state: Mapping[str, Any]) -> None:
        """The weights are those of a checkpoint again, whose memory `state` is; see the module's invariants."""
        before = self._watched
        self.load_state_dict(state)
        for name, watched in self._watched.items():
            then = before[name]
            watched.fired, watched.follow_ups, watched.in_trouble = then.fired, then.follow_ups, then.in_trouble
            watched.quiet = self.rules[name].cool_down_steps if then.in_trouble else then.quiet

    def _decide(self, step: int, metrics: Mapping[str, float], rules: Iterable[Rule]) -> list[Decision]:
        decisions = []
        self._step = step
        for rule in rules:
            watched, value = self._watched[rule.name], metrics.get(rule.metric)
            reading = read(rule, watched, step, value)
            (self._blind.discard if reading.has_value else self._blind.add)(rule.name)
            self._tell_what_came(rule, watched, step, reading)
            if reading.fires:
                self._fired_at[rule.name] = step
                decisions.append(decision(rule, watched, step, reading))
                self._write(step, "seen", rule, evidence=decisions[-1].evidence)
        return decisions

    def _tell_what_came(self, rule: Rule, watched: Watched, step: int, reading: Reading) -> None:
        if reading.level is None:
            return
        for due in [each for each in watched.follow_ups if each.due <= step]:
            watched.follow_ups.remove(due)
            is_gone = not rule.is_beyond(reading.level, due.limit)
            told = {"fired_at": due.step, "before": due.level, "after": reading.level, "limit": due.limit}
            self._write(step, "came_of_it", rule, **told, is_gone=is_gone)
        if reading.ends:
            self._write(step, "ended", rule, what="trouble", level=reading.level)

    def _write(self, step: int, kind: Kind, rule: Rule, **what: Any) -> None:
        if self._journal is not None:
            about = {"rule": rule.name, "action": rule.action.name, "metric": rule.metric, "condition": rule.condition}
            self._journal.write(step, kind, **about, **what)
