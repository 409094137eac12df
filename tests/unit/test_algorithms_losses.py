"""CTPO over small and large steps, what the diagnostics count, and how token losses become one number."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from toolrl.algorithms import aggregate, policy_losses
from toolrl.algorithms.diagnostics import RANGES, combine, range_metrics, ratio_metrics


def random_batch(seed: int, rows: int = 4, width: int = 12, step: float = 0.3) -> dict[str, torch.Tensor]:
    """[rows, width] float64; masks with holes, one-token turns and a row with a single policy token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(rows, width, generator=generator, dtype=torch.float64)

    old = -normal(1.0).abs() - 0.05
    policy_mask = torch.rand(rows, width, generator=generator) < 0.7
    policy_mask[:, 0] = True
    policy_mask[0, 1:] = False
    loss_mask = policy_mask & (torch.rand(rows, width, generator=generator) < 0.8)
    loss_mask[:, 0] = True
    return {
        "logp": old + normal(step),
        "old_logp": old,
        "advantages": normal(1.0),
        "policy_mask": policy_mask.double(),
        "loss_mask": loss_mask.double(),
        "rollout_logp": old + normal(0.2),
    }


def ctpo_reference(
    logp, old, advantages, policy, loss, low=0.025, high=0.05, dual=0.05, power=0.5, space="log", **_
) -> tuple[np.ndarray, np.ndarray]:
    """(token loss, d token loss / d logp at the same token) by the equations, one token at a time."""
    values, slopes = np.zeros(logp.shape), np.zeros(logp.shape)
    for i, t in np.ndindex(*logp.shape):
        if not loss[i, t]:
            continue
        seen = [k for k in range(t + 1) if policy[i, k]]
        total = sum(max(-20.0, min(20.0, float(logp[i, k] - old[i, k]))) for k in seen)
        scale = max(len(seen), 1) ** power
        log_rho = min(total, 10.0)
        a, rho = float(advantages[i, t]), math.exp(log_rho)
        in_logs = math.exp(max(-low * scale, min(high * scale, log_rho)))
        clipped = in_logs if space == "log" else max(1 - low, min(1 + high, rho))
        ceiling = math.exp(dual * scale) if dual else math.inf
        value, slope = -a * rho, (-a * rho if total <= 10 else 0.0)
        if -a * clipped > value:
            value, slope = -a * clipped, 0.0
        if a < 0 and value > -a * ceiling:
            value, slope = -a * ceiling, 0.0
        values[i, t], slopes[i, t] = value, slope
    return values, slopes


def arrays(batch: dict[str, torch.Tensor]) -> tuple[np.ndarray, ...]:
    names = ("logp", "old_logp", "advantages", "policy_mask", "loss_mask")
    return tuple(batch[name].detach().numpy() for name in names)


OPTIONS = [
    {},
    {"dual_clip": None},
    {"power": 0.0},
    {"power": -0.5},
    {"space": "ratio"},
    {"clip_low": 0.3, "clip_high": 0.01},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("step", [0.02, 0.3, 3.0])
def test_ctpo_equals_the_equations_with_its_stated_gradient(options, step):
    low, high = (0.2, 0.2) if options.get("space") == "ratio" else (0.025, 0.05)
    for seed in range(5):
        batch = random_batch(seed, step=step)
        batch["logp"].requires_grad_()
        found = policy_losses.ctpo(**batch, **options).token_loss
        values, slopes = ctpo_reference(
            *arrays(batch),
            low=options.get("clip_low", low),
            high=options.get("clip_high", high),
            dual=options.get("dual_clip", 0.05),
            power=options.get("power", 0.5),
            space=options.get("space", "log"),
        )
        np.testing.assert_allclose(found.detach().numpy(), values, rtol=1e-12, atol=1e-12)
        found.sum().backward()
        np.testing.assert_allclose(batch["logp"].grad.numpy(), slopes, rtol=1e-12, atol=1e-12)


def test_ctpo_gradient_is_that_of_the_token_alone_with_the_prefix_held_fixed():
    """Finite differences of the stop-gradient form: log ρ_t = [ℓ_t fixed] + logp_t − [logp_t fixed]."""
    batch = random_batch(3, step=0.02)
    batch["logp"].requires_grad_()
    policy_losses.ctpo(**batch).token_loss.sum().backward()
    logp, old, advantages, policy, loss = arrays(batch)
    width = 1e-6
    for i, t in zip(*np.nonzero(loss), strict=True):
        prefix = sum((logp - old)[i, k] for k in range(t) if policy[i, k])
        scale = policy[i, : t + 1].sum() ** 0.5
        bounds = (math.exp(-0.025 * scale), math.exp(0.05 * scale))

        def token_loss(x, i=i, t=t, prefix=prefix, scale=scale, bounds=bounds):
            a, rho = advantages[i, t], math.exp(prefix + x - old[i, t])
            value = max(-a * rho, -a * min(max(rho, bounds[0]), bounds[1]))
            return min(value, -a * math.exp(0.05 * scale)) if a < 0 else value

        slope = (token_loss(logp[i, t] + width) - token_loss(logp[i, t] - width)) / (2 * width)
        assert batch["logp"].grad[i, t].item() == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_log_bounds_widen_with_the_square_root_of_the_position():
    for position, low, high in ((1, 0.9753, 1.0513), (100, 0.779, 1.649), (1000, 0.454, 4.86)):
        mask = torch.ones(1, position, dtype=torch.float64)
        old = torch.zeros(1, position, dtype=torch.float64)
        for sign, bound in ((-1, low), (1, high)):
            logp = old.clone()
            logp[0, -1] = 5.0 * sign
            # A of the other sign does not clip there: −1 at a low ratio, +1 at a high one.
            found = policy_losses.ctpo(logp, old, torch.tensor([float(sign)]).double(), mask, dual_clip=None)
            assert abs(found.token_loss[0, -1].item()) == pytest.approx(bound, rel=2e-3)


def test_clip_fraction_by_position_and_exact_combination_over_micro_batches():
    batch = random_batch(5, rows=6, width=40, step=0.1)
    whole = policy_losses.ctpo(**batch).metrics
    parts = [
        policy_losses.ctpo(**{name: value[rows] for name, value in batch.items()}).metrics["sums"]
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    for name, value in ratio_metrics(combine(parts)).items():
        assert value.item() == pytest.approx(whole[name].item(), rel=1e-12)
    assert whole["ratio/clip_fraction"] > 0
    together = range_metrics(combine(parts))
    assert together == pytest.approx(range_metrics(whole["sums"]), rel=1e-12)
    assert len(together) == 4 and together["ratio/clip/by_position/1_16"] > 0  # 40 tokens reach into the second range


def test_ranges_count_policy_tokens_over_the_whole_row():
    policy = torch.ones(1, 1200)
    policy[0, 10:30] = 0  # a tool's
    loss = policy.clone()
    loss[0, 0] = 0  # a token out of the loss keeps its place: the 17th policy token stays the 17th
    logp = torch.zeros(1, 1200)
    logp[0, 36] = 1.0  # token 17
    logp[0, -1] = -1.0  # token 1180
    found = range_metrics(
        policy_losses.token(logp, torch.zeros_like(logp), torch.ones(1), policy, loss).metrics["sums"]
    )
    means = {name: found[f"ratio/mean/by_position/{name}"] for name in RANGES}
    assert means == pytest.approx(
        {"1_16": 1, "17_64": 1 + (math.e - 1) / 48, "65_256": 1, "257_1024": 1, "1025_on": 1 - (1 - 1 / math.e) / 156}
    )
    clipped = {name: found[f"ratio/clip/by_position/{name}"] for name in RANGES}
    assert clipped == pytest.approx({"1_16": 0, "17_64": 1 / 48, "65_256": 0, "257_1024": 0, "1025_on": 0})


def test_quarters_count_policy_tokens_only():
    mask = torch.tensor([[1, 0, 1, 0, 1, 1]]).double()
    logp = torch.tensor([[0, 9, 0, 9, 0, 9]]).double()  # only the last policy token is off
    found = policy_losses.token(logp, torch.zeros_like(logp), torch.ones(1).double(), mask).metrics
    assert [found[f"ratio/clip_fraction_q{q}"].item() for q in (1, 2, 3, 4)] == [0, 0, 0, 1]
    assert found["ratio/clip_fraction"] == 0.25


def test_aggregations_equal_their_definitions_and_parts_add_up_to_the_whole():
    generator = torch.Generator().manual_seed(0)
    loss = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    mask = (torch.rand(4, 6, generator=generator) < 0.6).double()
    mask[3] = 0
    rows = [loss[i][mask[i] > 0] for i in range(3)]
    expected = {
        "token_mean": torch.cat(rows).mean(),
        "seq_mean_token_mean": torch.stack([row.mean() for row in rows]).mean(),
        "seq_mean_token_sum_norm": torch.cat(rows).sum() / 24,
    }
    dirty = torch.where(mask > 0, loss, math.nan)
    for how, value in expected.items():
        torch.testing.assert_close(aggregate(dirty, mask, how), value)
        denominator = {"token_mean": int(mask.sum()), "seq_mean_token_mean": 3, "seq_mean_token_sum_norm": 24}[how]
        parts = [aggregate(dirty[[i]], mask[[i]], how, denominator=denominator) for i in range(4)]
        torch.testing.assert_close(sum(parts), value)
    with pytest.raises(ValueError, match="unknown aggregation"):
        aggregate(loss, mask, "mean")
