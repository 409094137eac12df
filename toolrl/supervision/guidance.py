"""Which trajectories of a group the policy did not sample by itself, written in their metadata.

`reference`: nobody sampled it here, it was put into the seat. `hint`: the policy sampled it after a prompt with a hint. What
is said of the policy (its tool-call rate, its solve rate, its format) is said of the others alone, its own samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from toolrl.trajectory import Trajectory

Guide = Literal["reference", "hint"]
_GUIDED = "guided"


def guided_by(trajectory: Trajectory) -> Guide | None:
    """What stood in for the policy, or led it; None for one of its own samples."""
    guide: Guide | None = trajectory.metadata.get(_GUIDED, {}).get("by")
    return guide


def own_samples(trajectories: Iterable[Trajectory]) -> list[Trajectory]:
    """Those that the policy sampled after the task's own prompt."""
    return [trajectory for trajectory in trajectories if guided_by(trajectory) is None]


def note_guide(trajectory: Trajectory, by: Guide, **details: Any) -> None:
    """Writes it down; `details` are values that JSON can hold."""
    trajectory.metadata[_GUIDED] = {"by": by, **details}


def guide_details(trajectory: Trajectory) -> dict[str, Any]:
    """What `note_guide` wrote, `by` included; empty for the policy's own samples."""
    found: dict[str, Any] = trajectory.metadata.get(_GUIDED, {})
    return found
