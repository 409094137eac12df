"""Which sample of which group an episode fills, and the randomness that belongs to it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class Seat:
    """One place in one group."""

    group_id: str
    sample_index: int
    seed: int  # of this sample's randomness, the same on every machine, in every schedule and on every try

    @property
    def trajectory_id(self) -> str:
        return f"{self.group_id}.{self.sample_index}"

    def turn_seed(self, turn: int) -> int:
        """The sampling seed of one policy turn, 31 bits; by the turn's index alone, so that an episode that is continued
        samples what it would have sampled."""
        digest = hashlib.blake2b(f"{self.seed}/{turn}".encode(), digest_size=4).digest()
        return int.from_bytes(digest, "big") >> 1
