"""Which groups a costly reward is worked out for."""

from __future__ import annotations

import hashlib


def is_measured(group_id: str, share: float, reward: str) -> bool:
    """Whether a group is among the `share` of all that a reward is worked out for.

    All of its members are, or none: nobody is ahead of its peers for having been measured. Drawn by the ids alone, so it is
    the same in every process and after a restart.
    """
    digest = hashlib.blake2b(f"{reward}/{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64
