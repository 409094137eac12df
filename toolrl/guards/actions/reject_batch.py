"""`reject_batch`: a batch that shows a collapse is not learnt from."""

from __future__ import annotations

from toolrl.guards.actions.action import Controls, Decision, Order, guard_actions


@guard_actions.register("reject_batch")
def reject_batch(controls: Controls, decision: Decision, *, most_in_a_row: int = 5) -> Order:
    """The batch leaves the ledger as dropped, for the reason `rejected`, before it reaches the learner; new tasks take its
    place. After `most_in_a_row` rejections one after the other the run pauses: the policy does not change while its
    batches are rejected, so more of them would not help."""
    return Order("reject_batch", {"most_in_a_row": most_in_a_row})
