"""What guards do, one action a file: `kl`, `llds`, `interaction_weight` and `lower_lr` turn controls; `reject_batch`,
`sft_burst`, `roll_back` and `pause` are orders to the training loop; `tell` only notes."""

from toolrl.guards.actions import (
    interaction_weight,
    kl,
    llds,
    lower_lr,
    pause,
    reject_batch,
    roll_back,
    sft_burst,
    tell,
)
from toolrl.guards.actions.action import (
    CORRECTIONS,
    Action,
    Order,
    OrderKind,
    guard_actions,
    needs_reference,
    reads_reference,
)

__all__ = ["CORRECTIONS", "Action", "Order", "OrderKind", "guard_actions", "needs_reference", "reads_reference"]
_BUILT_IN = (interaction_weight, kl, llds, lower_lr, pause, reject_batch, roll_back, sft_burst, tell)  # registers them
