"""Which policy turns of a trajectory enter the loss, decided from the recorded turns alone.

Invariant: this is about the loss only. A turn that is left out keeps its place among the policy tokens: ratios,
positions, advantages and the group's statistics are those of the whole trajectory.
"""

from __future__ import annotations

from typing import Literal

from toolrl.trajectory import Outcome, Trajectory

VoidTurns = Literal["train", "mask", "drop_trajectory"]
Truncated = Literal["train", "mask"]


def void_turns(trajectory: Trajectory) -> list[bool]:
    """[n_policy_turns] True for a turn that holds neither a complete call nor the final answer (SimpleTIR, 2509.02479).

    - A complete call is one that the parser read, whatever came of it: `turn.calls` is not empty. Pieces that meant to
      be a call (`call_errors`) make none.
    - The final answer belongs to the last policy turn, where `trajectory.answer` was read from it. A turn that the
      length limit or an abort cut short gives none, whatever its text holds.
    """
    turns = trajectory.policy_turns
    void = [not turn.calls for turn in turns]
    if turns and trajectory.answer is not None:
        void[-1] = False
    return void


def turns_in_loss(
    trajectory: Trajectory, *, void_turns_are: VoidTurns = "train", truncated_are: Truncated = "train"
) -> list[bool]:
    """[n_policy_turns] True for the turns whose tokens enter the loss.

    Args:
        void_turns_are: what becomes of `void_turns`: they are trained as any other, only they are left out (`mask`), or
            the whole trajectory that holds one is (`drop_trajectory`: SimpleTIR).
        truncated_are: what becomes of a trajectory that a budget of tokens cut off (outcome `length`): trained, or left
            out as a whole (`mask`: the overlong filtering of DAPO, 2503.14476, section 3.4).

    Raises:
        ValueError: a choice that does not exist.
    """
    if void_turns_are not in ("train", "mask", "drop_trajectory"):
        raise ValueError(f"void turns {void_turns_are!r}; known: train, mask, drop_trajectory")
    if truncated_are not in ("train", "mask"):
        raise ValueError(f"truncated trajectories {truncated_are!r}; known: train, mask")
    void = void_turns(trajectory)
    cut = truncated_are == "mask" and trajectory.outcome is Outcome.LENGTH
    if cut or (void_turns_are == "drop_trajectory" and any(void)):
        return [False] * len(void)
    return [not is_void for is_void in void] if void_turns_are == "mask" else [True] * len(void)
