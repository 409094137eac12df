"""The account of a run's samples: what was issued and where each of it is now.

A sample is one trajectory to be had: one place in one group. It is issued once, with its group, and is in exactly one
state afterwards. Trying it again (its engine died, its tokens are too old) is the same sample, so `issued` does not
move.

Conservation, at every moment: issued = trained + dropped + ready + leased + generating.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Ledger:
    """Counts of samples.

    `generating` has four parts: `waiting` (no worker holds it), `running` (a worker does), `unrewarded` (finished, but
    rewards of it are still to come), `arrived` (finished, but others of its group are not). `dropped` is by reason.
    `reissued` counts trajectories that were thrown away while their sample was tried again; `outcomes` how every
    trajectory ended that was taken in, once its rewards are there or given up; `puts` what came of each delivery, and
    `late_rewards` of each reward that was delivered. The last four are no states of samples.
    """

    issued: int
    trained: int
    ready: int
    leased: int
    waiting: int
    running: int
    arrived: int
    dropped: dict[str, int] = field(default_factory=dict)
    reissued: dict[str, int] = field(default_factory=dict)
    outcomes: dict[str, int] = field(default_factory=dict)
    puts: dict[str, int] = field(default_factory=dict)
    late_rewards: dict[str, int] = field(default_factory=dict)
    unrewarded: int = 0

    @property
    def generating(self) -> int:
        return self.waiting + self.running + self.unrewarded + self.arrived

    @property
    def generating_parts(self) -> dict[str, int]:
        """What `generating` is made of."""
        names = ("waiting", "running", "unrewarded", "arrived")
        return {name: getattr(self, name) for name in names}

    @property
    def details(self) -> dict[str, dict[str, int]]:
        """The counts that are no states, by a word for people."""
        return {
            "re-issued": self.reissued,
            "outcomes": self.outcomes,
            "deliveries": self.puts,
            "late rewards": self.late_rewards,
        }

    @property
    def dropped_total(self) -> int:
        return sum(self.dropped.values())

    @property
    def balances(self) -> bool:
        """Whether the conservation law holds."""
        return self.issued == self.trained + self.dropped_total + self.ready + self.leased + self.generating

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the law's terms first, then the details."""
        return {
            "issued": self.issued,
            "trained": self.trained,
            "dropped": dict(self.dropped),
            "ready": self.ready,
            "leased": self.leased,
            "generating": self.generating,
            **self.generating_parts,
            "reissued": dict(self.reissued),
            "outcomes": dict(self.outcomes),
            "puts": dict(self.puts),
            "late_rewards": dict(self.late_rewards),
            "balances": self.balances,
        }

    def __str__(self) -> str:
        rows = [
            ("issued", self.issued, ""),
            ("trained", self.trained, ""),
            ("dropped", self.dropped_total, _parts(self.dropped)),
            ("ready", self.ready, ""),
            ("leased", self.leased, ""),
            ("generating", self.generating, _parts(self.generating_parts)),
        ]
        lines = [f"{name:<11}{count:>9}  {detail}".rstrip() for name, count, detail in rows]
        for name, parts in self.details.items():
            if parts:
                lines.append(f"{name:<22}{_parts(parts)}")
        lines.append(
            "balances" if self.balances else "DOES NOT BALANCE: the account is damaged; keep the file and report it"
        )
        return "\n".join(lines)


def _parts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counts.items()) if count)
