"""`roll_back`: the weights of the last good checkpoint, for a policy that has collapsed."""

from __future__ import annotations

from toolrl.guards.actions.action import Controls, Decision, Order, guard_actions


@guard_actions.register("roll_back")
def roll_back(controls: Controls, decision: Decision, *, margin_steps: int = 5, most_in_a_row: int = 3) -> Order:
    """Models, optimiser and the guards' memory go back to a checkpoint at whose step no rule held; steps, versions and
    the ledger go on.

    Args:
        margin_steps: how much older than now the checkpoint is to be, since a collapse begins before it shows; where
            there is none so old, the oldest good one is taken.
        most_in_a_row: roll-backs without a good checkpoint made between them, after which the run pauses instead.
    """
    return Order("roll_back", {"margin_steps": margin_steps, "most_in_a_row": most_in_a_row})
