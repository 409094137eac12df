"""Guards at work in the training loop: what they see, what they turn, what is carried out for them.

`rejects` is asked before a batch is learnt from, `observe` once the step is done, `act` then does what `observe` decided.
Everything is said three times: in the metrics (`guard/RULE`, `controls/NAME`), in the journal and on the screen.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from toolrl.app.guard_orders import roll_back, sft_burst
from toolrl.app.parts import Parts
from toolrl.app.progress import Progress, save_checkpoint
from toolrl.app.viewer.view import View
from toolrl.config import RunConfig
from toolrl.guards.actions import CORRECTIONS, Order, guard_actions
from toolrl.guards.controls import OWN_VALUES, Controls
from toolrl.guards.guards import BEFORE_LEARNING, Guards
from toolrl.guards.journal import Journal
from toolrl.guards.presets import rules
from toolrl.guards.rule import Decision

PAUSE_DEADLINE_S = 86400.0  # of a pause that no rule asked for by name
_SEQUENCE = ("reject_batch", "roll_back", "sft_burst", "pause")  # a burst is for the weights that stay


class Guarding:
    """The guards of one run. `await Guarding.start(…)` goes on with what the checkpoint held of them."""

    def __init__(self, parts: Parts, progress: Progress, view: View) -> None:
        config, before = parts.config, progress.guards
        self.parts, self.progress, self.view = parts, progress, view
        self.journal = Journal(parts.folder.path, resumed_at=progress.step)
        self.guards = Guards(rules(config), self.journal)
        self.guards.load_state_dict(before.get("rules", {}))
        self.controls = Controls.of(reward_weights(config), before.get("controls"))
        self.roll_backs_in_a_row = int(before.get("roll_backs_in_a_row", 0))
        self.rejected_in_a_row = 0
        self._rejected = 0  # since the last step
        self._due: list[Decision] = []
        self._sent = dict(OWN_VALUES)  # what the learner has

    @classmethod
    async def start(cls, parts: Parts, progress: Progress, view: View) -> Guarding:
        guarding = cls(parts, progress, view)
        await guarding._send_controls()
        return guarding

    @property
    def judges_batches(self) -> bool:
        """Whether some rule may reject a batch."""
        return any(rule.action.name == BEFORE_LEARNING for rule in self.guards.rules.values())

    @property
    def is_good(self) -> bool:
        """Whether a checkpoint of now is one to go back to: no rule that answers a collapse holds, or begins to."""
        grave = [name for name, rule in self.guards.rules.items() if rule.action.name not in CORRECTIONS]
        watched = [self.guards.watched(name) for name in grave]
        return not any(each.in_trouble or each.streak for each in watched)

    async def checkpoint(self) -> None:
        """A checkpoint that holds what the guards remember, unless there is one of this step already."""
        if self.progress.saved_step == self.progress.step:
            return
        if self.is_good:
            self.roll_backs_in_a_row = 0
        await save_checkpoint(self.parts, self.progress, self._state(), is_good=self.is_good)

    def _state(self) -> dict[str, Any]:
        return {
            "rules": self.guards.state_dict(),
            "controls": self.controls.to_dict(),
            "roll_backs_in_a_row": self.roll_backs_in_a_row,
        }

    async def rejects(self, batch_id: int, metrics: Mapping[str, float]) -> bool:
        """Judges a batch before it is learnt from; a rejected one leaves the ledger as dropped, for the reason
        `rejected`. After too many in a row the run pauses."""
        step = self.progress.step + 1
        decisions = self.guards.before_learning(step, metrics)
        if not decisions:
            self.rejected_in_a_row = 0
            return False
        await self.parts.buffer.reject.remote(batch_id, "rejected")
        self.progress.batch_id = None
        self._rejected += 1
        self.rejected_in_a_row += 1
        for decision in decisions:
            order = _order(decision, self.controls)
            self._done(decision, f"rejected batch {batch_id} ({self.rejected_in_a_row} in a row)", batch=batch_id)
            if order is not None and self.rejected_in_a_row >= order.options["most_in_a_row"]:
                self.rejected_in_a_row = 0
                # At the step whose checkpoint a resumed run goes on from, so that its journal keeps why.
                paused = replace(decision, step=self.progress.step)
                await self._pause(paused, f"{order.options['most_in_a_row']} batches were rejected in a row")
        return True

    def observe(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Shows the guards a finished step; returns their own metrics: which rules fired, and the controls as they were
        during the step."""
        during = self.controls.metrics()
        self._due = self.guards.observe(self.progress.step, metrics)
        rejected, self._rejected = self._rejected, 0
        if not self.guards.rules:
            return {}
        return {**during, **self.guards.metrics(), "guards/rejected_batches": float(rejected)}

    async def act(self) -> None:
        """Does what the guards decided at the last `observe`, in effect from the next batch on."""
        step = self.progress.step
        for ended in self.controls.tick(step, self.guards.holding):
            own = self.controls.value(ended.control)
            for rule in ended.rules:
                self._ended(rule, f"let {ended.control} come back to {own:.3g}", control=ended.control, value=own)
        orders: dict[str, tuple[Decision, Order]] = {}
        for decision in self._due:
            before = self.controls.values()
            order = _order(decision, self.controls)
            if order is None:
                changed = {k: [before[k], v] for k, v in self.controls.values().items() if v != before[k]}
                turned = ", ".join(f"turned {name} from {was:.3g} to {now:.3g}" for name, (was, now) in changed.items())
                nothing = "told it" if decision.action == "tell" else "changed nothing"
                self._done(decision, turned or nothing, changed=changed)
            else:
                orders.setdefault(order.kind, (decision, order))
        self._due = []
        await self._send_controls()
        for decision, order in sorted(orders.values(), key=lambda each: _SEQUENCE.index(each[1].kind)):
            await self._carry_out(decision, order)

    async def _carry_out(self, decision: Decision, order: Order) -> None:
        match order.kind:
            case "roll_back":
                await self._roll_back(decision, **order.options)
            case "sft_burst":
                await self._sft_burst(decision, **order.options)
            case "pause":
                await self._pause(decision, None, **order.options)
            case "reject_batch":
                self._done(decision, "came too late to reject the batch")

    async def _roll_back(self, decision: Decision, *, margin_steps: int, most_in_a_row: int) -> None:
        if self.roll_backs_in_a_row >= most_in_a_row:
            self.roll_backs_in_a_row = 0
            return await self._pause(decision, f"{most_in_a_row} roll-backs in a row have not helped")
        if not await self._go_back(decision, margin_steps):
            await self._pause(decision, "there is no good checkpoint to go back to")
        return None

    async def _go_back(self, decision: Decision, margin_steps: int) -> bool:
        good = await roll_back(self.parts, self.progress, self.view, margin_steps=margin_steps)
        if good is None:
            return False
        self.roll_backs_in_a_row += 1
        self.guards.roll_back(good.guards.get("rules", {}))
        version = self.progress.version
        text = f"went back to the weights of step {good.step}, published as version {version}"
        self._done(decision, text, to_step=good.step, version=version)
        # At once, so that a resumed run does not meet the bad ones again.
        await save_checkpoint(self.parts, self.progress, self._state())
        return True

    async def _sft_burst(self, decision: Decision, **options: Any) -> None:
        lesson = await sft_burst(self.parts, self.progress, self.view, **options)
        if not lesson.losses:
            return self._done(decision, "found no reference trajectory to learn from", losses=[])
        first, last = lesson.losses[0], lesson.losses[-1]
        steps = f"{len(lesson.losses)} supervised steps on {lesson.references} references"
        text = f"trained {steps} (loss {first:.3f} to {last:.3f})"
        return self._done(decision, text, losses=lesson.losses, version=self.progress.version)

    async def _pause(self, decision: Decision, instead: str | None, *, deadline_s: float = PAUSE_DEADLINE_S) -> None:
        """`instead`: why the run pauses, where its action is another one."""
        why = instead or f"{decision.metric} is {_level(decision)}"
        await self.parts.buffer.admit.remote(False)
        await self.checkpoint()
        name = self.parts.folder.path.name
        self._done(decision, "paused the run" if instead is None else f"paused the run, because {instead}")
        self.view.stage(
            f"paused by guard {decision.rule}: `toolrl continue {name}` goes on, `… --roll-back` from the last good "
            f"checkpoint; `toolrl stop {name}` ends it, to be resumed with other settings"
        )
        answer = await self.progress.pausing.wait(f"of guard {decision.rule}: {why}", deadline_s)
        self._ended(decision.rule, f"ended the pause when told to {answer.replace('_', ' ')}", answer=answer)
        if answer == "roll_back" and not await self._go_back(decision, 0):
            self.view.note("there is no good checkpoint: on with the weights as they are")
        if answer != "stop":
            await self.parts.buffer.admit.remote(True)

    async def _send_controls(self) -> None:
        wanted = {name: self.controls.value(name) for name in OWN_VALUES}
        if wanted != self._sent:
            await self.parts.learner.set_controls(**wanted)
            self._sent = wanted

    def _done(self, decision: Decision, text: str, **what: Any) -> None:
        self.journal.write(decision.step, "done", rule=decision.rule, action=decision.action, text=text, **what)
        self.view.note(f"guard {decision.rule} {text}: {decision.metric} was {_level(decision)}")

    def _ended(self, rule: str, text: str, **what: Any) -> None:
        action = self.guards.rules[rule].action.name if rule in self.guards.rules else ""
        self.journal.write(self.progress.step, "ended", rule=rule, action=action, what="action", text=text, **what)
        self.view.note(f"guard {rule} {text}")


def reward_weights(config: RunConfig) -> dict[str, float]:
    """{component: weight} of every reward of the run."""
    names = [part.name.rpartition(":")[2] for part in config.rewards.components]
    return {name: config.rewards.weights.get(name, 1.0) for name in [*names, *config.rewards.late.names]}


def _order(decision: Decision, controls: Controls) -> Order | None:
    return guard_actions.get(decision.action)(controls, decision, **decision.options)


def _level(decision: Decision) -> str:
    return f"{decision.evidence['level']:.4g} (limit {decision.evidence['limit']:.4g})"
