"""Control tokens in and outside their legal slots, and entropy at decision points: read on the pass that gives the batch its
`old_logp`, so before its first update and without a pass of its own.

Everything is a sum or a maximum over sampled tokens in `Sums`: one rank or several, the numbers are the same.
"""

from __future__ import annotations

import numpy as np
import torch

from learner.metrics import Sums
from learner.micro_batches import MicroBatch
from toolrl.monitors.control_tokens import ControlTokens
from toolrl.monitors.legal_slots import sequence_slots

_WHOLE = ("control_tokens", "control_mass", "control_decisions", "control_entropy")
_ADDED = ("control_in_count", "control_out_count", "control_in_logp", "control_out_logp", "control_out_mass")
_HIGHEST = ("control_in_max", "control_out_max")
_LOWEST = -100.0  # e^-100 is nothing in float32; a logit of -inf would make a mean of -inf


class ControlWatch:
    """Watches one batch, and tells what it saw when the batch is done."""

    def __init__(self, control: ControlTokens, device: torch.device) -> None:
        self.control = control
        self.ids = torch.from_numpy(control.ids).to(device)
        tokens, wide = len(control.ids), {"dtype": torch.float64, "device": device}
        self._whole = torch.zeros(len(_WHOLE), **wide)
        self._added = torch.zeros(len(_ADDED), tokens, **wide)
        self._highest = torch.full((len(_HIGHEST), tokens), -torch.inf, **wide)

    def see(self, micro: MicroBatch, entropy: torch.Tensor, logp: torch.Tensor) -> None:
        """Adds one micro-batch: entropies [M] and log-probabilities of the watched tokens [M, C] where its policy tokens were
        drawn. Of sequences that are not the policy's own nothing is said."""
        found = [
            sequence_slots(self.control, each.token_ids, each.prompt_length, each.policy_mask, each.turn_ids)
            for each in micro.sequences
            if each.is_own
        ]
        if not found:
            return
        legal = torch.from_numpy(np.concatenate([slots.legal for slots in found])).to(logp.device)
        decisions = torch.from_numpy(np.concatenate([slots.decisions for slots in found])).to(logp.device)
        with torch.no_grad():
            own = _own_rows(micro).to(logp.device)
            logp = logp.index_select(0, own).double().clamp(min=_LOWEST)
            entropy = entropy.index_select(0, own).double()
            mass = torch.where(legal, 0.0, logp.exp()).sum(0)
            inside, outside = (torch.where(where, logp, 0.0).sum(0) for where in (legal, ~legal))
            count = legal.sum(0)
            self._added += torch.stack([count, len(legal) - count, inside, outside, mass])
            highest = [torch.where(where, logp, -torch.inf).amax(0) for where in (legal, ~legal)]
            self._highest = torch.maximum(self._highest, torch.stack(highest))
            tokens = entropy.new_tensor(len(legal))
            self._whole += torch.stack([tokens, mass.sum(), decisions.sum(), entropy[decisions].sum()])

    def tell(self, sums: Sums) -> None:
        """Adds what was seen; every rank adds the same names, whatever its share was."""
        sums.add(**dict(zip(_WHOLE, self._whole.unbind(), strict=True)))
        for quantity, values in zip(_ADDED, self._added, strict=True):
            sums.add(**self._named(quantity, values))
        for quantity, values in zip(_HIGHEST, self._highest, strict=True):
            sums.keep_largest(**self._named(quantity, values))

    def _named(self, quantity: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        names = (f"{quantity}/{token}" for token in self.control.names)
        return dict(zip(names, values.unbind(), strict=True))


def control_metrics(control: ControlTokens, sums: Sums) -> dict[str, float]:
    """`control/…` and `entropy/decision`; what was nowhere to be seen has no metric."""
    totals = {name: float(value) for name, value in sums.totals.items()}
    found = {}
    if decisions := totals["control_decisions"]:
        found["entropy/decision"] = totals["control_entropy"] / decisions
    if tokens := totals["control_tokens"]:
        found["control/mass_outside"] = totals["control_mass"] / tokens
    for token in control.names:
        for side, ending in (("in", ""), ("out", "_outside")):
            if count := totals[f"control_{side}_count/{token}"]:
                found[f"control/{token}/logp_mean{ending}"] = totals[f"control_{side}_logp/{token}"] / count
                found[f"control/{token}/logp_max{ending}"] = float(sums.largest[f"control_{side}_max/{token}"])
        if count := totals[f"control_out_count/{token}"]:
            found[f"control/{token}/mass_outside"] = totals[f"control_out_mass/{token}"] / count
    return found


def _own_rows(micro: MicroBatch) -> torch.Tensor:
    """[n] which of the M policy tokens are of the policy's own sequences; none of the one token of an empty share."""
    sizes = [int(sequence.policy_mask.sum()) for sequence in micro.sequences]
    own = np.repeat([sequence.is_own for sequence in micro.sequences], sizes).astype(bool)
    return torch.from_numpy(np.flatnonzero(own))
