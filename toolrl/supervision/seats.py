"""Which seats of a group are guided. By the seat's index alone: whoever plays a ticket, on whichever try, decides alike.

The last seats go to references, those before them to hints; the seats that come first are the policy's own, so that its
samples have the same seeds with and without supervision.
"""

from __future__ import annotations

from toolrl.config_supervision import SupervisionConfig
from toolrl.supervision.guidance import Guide


def guide_of_seat(sample_index: int, group_size: int, config: SupervisionConfig) -> Guide | None:
    """What guides the sample in this seat; None: nothing. A reference's seat whose task has none is played as any other."""
    from_the_end = group_size - 1 - sample_index
    if from_the_end < config.off_policy.per_group:
        return "reference"
    if from_the_end < config.off_policy.per_group + config.hint.per_group:
        return "hint"
    return None
