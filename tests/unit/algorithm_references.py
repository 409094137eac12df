"""Batches as recorded episodes give them, and the policy losses once more: by their equations, in plain Python, one token at a
time, in float64.

A reference takes the log-probabilities twice: `x` where the equation differentiates and `fixed` where it stops the
gradient. With both equal it gives the loss; moving one entry of `x` gives the stated gradient by finite differences.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

Rows = list[list[float]]
Batch = dict[str, torch.Tensor]
FIELDS = ("logp", "old_logp", "rollout_logp", "advantages")


def recorded_batch(seed: int, rows: int = 5, step: float = 0.1, pad: int = 2) -> Batch:
    """[rows, T] float64 with turns of one to four tokens, tool turns of none to three, a row of a single policy token, a
    row without a token in the loss, and padding."""
    generator = np.random.default_rng(seed)
    turns = [_turn_ids(generator, 1 if row == 0 else int(generator.integers(1, 5)), row == 0) for row in range(rows)]
    width = max(map(len, turns)) + pad
    ids = np.asarray([[*row, *[-1] * (width - len(row))] for row in turns])
    policy = ids >= 0
    loss = policy & (generator.random(ids.shape) < 0.8)
    loss[0], loss[1] = policy[0], False
    old = -np.abs(generator.normal(0, 1, ids.shape)) - 0.05
    arrays = {
        "logp": np.minimum(old + generator.normal(0, step, ids.shape), -0.01),
        "old_logp": old,
        "rollout_logp": np.minimum(old + generator.normal(0, 0.1, ids.shape), -0.01),
        "advantages": generator.normal(0, 1, ids.shape),
        "policy_mask": policy.astype(float),
        "loss_mask": loss.astype(float),
    }
    return {name: torch.from_numpy(array) for name, array in arrays.items()} | {"turn_ids": torch.from_numpy(ids)}


def poisoned(batch: Batch, seed: int = 0) -> Batch:
    """The same batch with NaN, −inf, inf or a large number where the policy mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    bad = torch.tensor([math.nan, -math.inf, math.inf, 1e30], dtype=torch.float64)
    outside = batch["policy_mask"] == 0
    changed = dict(batch)
    for name in FIELDS:
        drawn = bad[torch.randint(0, 4, outside.shape, generator=generator)]
        changed[name] = torch.where(outside, drawn, batch[name])
    return changed


def lists(batch: Batch) -> dict[str, Any]:
    return {name: value.tolist() for name, value in batch.items()}


def reference(name: str, batch: Batch, x: Rows | None = None, **options: Any) -> Rows:
    """Token losses of the policy loss `name` on a batch; 0 outside the loss mask."""
    given = lists(batch)
    fixed = given["logp"]
    x = fixed if x is None else x
    rows = []
    for i, live in enumerate(x):
        policy = [t for t, m in enumerate(given["policy_mask"][i]) if m]
        found = ROWS[name](
            live,
            fixed[i],
            given["old_logp"][i],
            given["rollout_logp"][i],
            given["advantages"][i],
            policy,
            given["turn_ids"][i],
            **options,
        )
        kept = [t for t in policy if given["loss_mask"][i][t]]
        rows.append([found[t] if t in kept else 0.0 for t in range(len(live))])
    return rows


def stated_gradient(name: str, batch: Batch, width: float = 1e-6, **options: Any) -> np.ndarray:
    """d(sum of the token losses)/dx at x = fixed, by central differences of the equation with its stopped parts fixed."""
    base = batch["logp"].tolist()
    slopes = np.zeros(batch["logp"].shape)
    for i, t in zip(*np.nonzero(batch["policy_mask"].numpy()), strict=True):
        sums = []
        for sign in (1, -1):
            moved = [list(row) for row in base]
            moved[i][t] += sign * width
            sums.append(math.fsum(value for row in reference(name, batch, moved, **options) for value in row))
        slopes[i, t] = (sums[0] - sums[1]) / (2 * width)
    return slopes


def clipped_loss(ratio: float, a: float, low: float, high: float) -> float:
    return -min(ratio * a, max(1 - low, min(1 + high, ratio)) * a)


def _token(x, fixed, old, mu, a, policy, turns, clip_low=0.2, clip_high=0.2, dual_clip=None):
    losses = {}
    for t in policy:
        losses[t] = clipped_loss(math.exp(x[t] - old[t]), a[t], clip_low, clip_high)
        if dual_clip and a[t] < 0:
            losses[t] = min(losses[t], -dual_clip * a[t])
    return losses


def _spans(x, fixed, old, a, span_of, low, high):
    """`span_of`: policy token -> its span."""
    losses = {}
    for t, span in span_of.items():
        mean = statistics.fmean(fixed[k] - old[k] for k, other in span_of.items() if other == span)
        losses[t] = clipped_loss(math.exp(mean) * math.exp(x[t]) / math.exp(fixed[t]), a[t], low, high)
    return losses


def _gspo(x, fixed, old, mu, a, policy, turns, clip_low=3e-4, clip_high=4e-4):
    return _spans(x, fixed, old, a, dict.fromkeys(policy, 0), clip_low, clip_high)


def _steppo(x, fixed, old, mu, a, policy, turns, clip_low=0.2, clip_high=0.2):
    return _spans(x, fixed, old, a, {t: turns[t] for t in policy}, clip_low, clip_high)


def _cispo(x, fixed, old, mu, a, policy, turns, clip_low=None, clip_high=5.0):
    losses = {}
    for t in policy:
        weight = min(math.exp(fixed[t] - old[t]), 1 + clip_high)
        if clip_low is not None:
            weight = max(weight, 1 - clip_low)
        losses[t] = -weight * a[t] * x[t]
    return losses


def _cppo(x, fixed, old, mu, a, policy, turns, delta=0.15, w_min=0.8):
    if not policy:
        return {}
    distance = [abs(math.exp(fixed[t]) - math.exp(mu[t])) for t in policy]
    budget = min(0.04, max(0.02, float(np.percentile(distance, 90))))
    length, losses = len(policy), {}
    used = allowed = 0.0
    for place, t in enumerate(policy, start=1):
        weight = w_min + (1 - w_min) * (length - place) / (length - 1) if length > 1 else 1.0
        z = weight * distance[place - 1]
        limit = min(delta, delta + budget * allowed - used)
        keep = a[t] * (math.exp(fixed[t] - mu[t]) - 1) <= 0 or z <= limit
        losses[t] = -a[t] * math.exp(x[t] - mu[t]) * keep
        used, allowed = used + z, allowed + weight
    return losses


def _ctpo(x, fixed, old, mu, a, policy, turns, clip_low=0.025, clip_high=0.05, dual_clip=0.05, power=0.5, space="log"):
    losses, total = {}, 0.0
    for place, t in enumerate(policy, start=1):
        total += max(-20.0, min(20.0, fixed[t] - old[t]))
        scale = place**power
        log_rho = min(total + x[t] - fixed[t], 10.0)
        rho = math.exp(log_rho)
        bounded = math.exp(max(-clip_low * scale, min(clip_high * scale, log_rho)))
        if space == "ratio":
            bounded = max(1 - clip_low, min(1 + clip_high, rho))
        losses[t] = max(-a[t] * rho, -a[t] * bounded)
        if dual_clip and a[t] < 0:
            losses[t] = min(losses[t], -a[t] * math.exp(dual_clip * scale))
    return losses


ROWS: dict[str, Callable[..., dict[int, float]]] = {
    "token": _token,
    "gspo": _gspo,
    "steppo": _steppo,
    "cispo": _cispo,
    "cppo": _cppo,
    "ctpo": _ctpo,
}


def _turn_ids(generator: np.random.Generator, turns: int, single: bool) -> list[int]:
    ids: list[int] = []
    for turn in range(turns):
        ids += [-1] * int(generator.integers(0, 4)) if turn else []  # a tool that may return nothing
        ids += [turn] * (1 if single else int(generator.integers(1, 5)))
    return ids
