"""What guards have turned away from what the config says, and how each of it comes back.

A control keeps its value while a rule that turned it goes on holding and for `steps` steps after it; then what it differs by
from its own value shrinks by `fade` a step (0: at once) until it is back. Every control therefore ends, and what is in force
is a function of the steps alone: a resumed run has the same.

Names: `lr_factor` (multiplies the learning rate of the schedule), `kl_weight` (of KL to the reference, beside the config's),
`llds_weight` (likewise of LLDS) and `reward_weight/NAME` (in the place of `rewards.weights.NAME`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

from toolrl.registry import nearest

REWARD_WEIGHT = "reward_weight/"
OWN_VALUES = {"lr_factor": 1.0, "kl_weight": 0.0, "llds_weight": 0.0}
_BACK = 0.01  # of the first difference: what is left below it is none


@dataclass
class Turned:
    """One control as a guard set it."""

    value: float
    own: float  # where it comes back to
    rules: list[str]  # that turned it
    steps: int  # that it is kept for after the rule last held
    fade: float  # what is left a step, after that, of the difference to `own`
    until: int  # the last step for which it is kept
    peak: float  # the difference that it began to fade from


@dataclass(frozen=True)
class Ended:
    """A control that is back at its own value, and the rules that had turned it."""

    control: str
    rules: list[str]


@dataclass
class Controls:
    """See the module. `Controls.of(weights)` of a run's rewards; without weights no reward's can be turned."""

    own: dict[str, float] = field(default_factory=lambda: dict(OWN_VALUES))
    turned: dict[str, Turned] = field(default_factory=dict)

    @classmethod
    def of(cls, reward_weights: Mapping[str, float], state: Mapping[str, Any] | None = None) -> Controls:
        """Of a run: its rewards' weights by name, and what `to_dict` gave of controls that were turned."""
        own = OWN_VALUES | {f"{REWARD_WEIGHT}{name}": weight for name, weight in reward_weights.items()}
        turned = {name: Turned(**each) for name, each in (state or {}).items() if name in own}
        return cls(own, turned)

    @property
    def lr_factor(self) -> float:
        return self.value("lr_factor")

    @property
    def kl_weight(self) -> float:
        return self.value("kl_weight")

    @property
    def llds_weight(self) -> float:
        return self.value("llds_weight")

    @property
    def reward_weights(self) -> dict[str, float]:
        """{component: weight} in force, of every component that has one."""
        names = [name for name in self.own if name.startswith(REWARD_WEIGHT)]
        return {name.removeprefix(REWARD_WEIGHT): self.value(name) for name in names}

    def value(self, control: str) -> float:
        """What is in force. Raises ValueError for a control that is none."""
        if control not in self.own:
            raise ValueError(f"unknown control {control!r}{nearest(control, list(self.own))}")
        return self.turned[control].value if control in self.turned else self.own[control]

    def turn(self, control: str, value: float, *, rule: str, step: int, steps: int, fade: float = 0.0) -> None:
        """Sets a control from the next batch on, kept at least for the `steps` steps after `step`.

        Raises:
            ValueError: no such control, a value that is no number, or an ending that is none.
        """
        self.value(control)
        if not math.isfinite(value) or value < 0:
            raise ValueError(f"control {control!r} cannot be {value}; it is a finite number of 0 or more")
        if steps < 1 or not 0 <= fade < 1:
            raise ValueError(f"control {control!r}: steps={steps} must be 1 or more and fade={fade} in [0, 1)")
        own, before = self.own[control], self.turned.get(control)
        rules = sorted({rule, *(before.rules if before else ())})
        until = max(step + steps, before.until if before else 0)
        self.turned[control] = Turned(value, own, rules, steps, fade, until, abs(value - own))

    def tick(self, step: int, holding: Set[str] = frozenset()) -> list[Ended]:
        """After step `step`: keeps what is to be kept, fades the rest; says what has come to its end.

        Args:
            holding: the rules whose condition holds now, whether or not they may fire.
        """
        ended = []
        for control, each in list(self.turned.items()):
            if not holding.isdisjoint(each.rules):
                each.until = step + each.steps
            elif step >= each.until:
                each.value = each.own + each.fade * (each.value - each.own)
                if abs(each.value - each.own) <= _BACK * each.peak:
                    del self.turned[control]
                    ended.append(Ended(control, each.rules))
        return ended

    def values(self) -> dict[str, float]:
        """Every control that there is, and what is in force."""
        return {name: self.value(name) for name in self.own}

    def metrics(self) -> dict[str, float]:
        """`controls/NAME` of those that are always there, and of the rewards' weights that are turned."""
        return {f"controls/{name}": self.value(name) for name in {**OWN_VALUES, **self.turned}}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: dataclasses.asdict(each) for name, each in self.turned.items()}
