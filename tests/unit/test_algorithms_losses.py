"""Policy losses and corrections against scalar float64 references, on random batches with holes and poisoned masked places."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from toolrl.algorithms import aggregate, corrections, policy_losses
from toolrl.algorithms.diagnostics import combine, ratio_metrics

POISON = [math.nan, math.inf, -math.inf]


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
        if space == "log":
            clipped = math.exp(max(-low * scale, min(high * scale, log_rho)))
            ceiling = math.exp(dual * scale) if dual else math.inf
        else:
            clipped = max(1 - low, min(1 + high, rho))
            ceiling = 1 + dual if dual else math.inf
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


@pytest.mark.parametrize("dual", [None, 3.0])
def test_token_loss_equals_the_equation_and_its_gradient_finite_differences(dual):
    for seed in range(5):
        batch = random_batch(seed)
        batch["logp"].requires_grad_()
        found = policy_losses.token(**batch, clip_high=0.28, dual_clip=dual).token_loss
        logp, old, a, _, loss = arrays(batch)
        ratio = np.exp(logp - old)
        expected = -np.minimum(ratio * a, np.clip(ratio, 0.8, 1.28) * a)
        if dual:
            expected = np.where(a < 0, np.minimum(expected, -dual * a), expected)
        np.testing.assert_allclose(found.detach().numpy(), np.where(loss > 0, expected, 0), rtol=1e-12)

        def token_losses(x: torch.Tensor, batch=batch) -> torch.Tensor:
            return policy_losses.token(**(batch | {"logp": x}), clip_high=0.28, dual_clip=dual).token_loss

        assert torch.autograd.gradcheck(token_losses, (batch["logp"],), eps=1e-7, atol=1e-5)


@pytest.mark.parametrize("name", ["token", "ctpo"])
@pytest.mark.parametrize("poison", POISON)
def test_what_stands_at_mask_zero_stays_out(name, poison):
    loss = getattr(policy_losses, name)
    clean, dirty = random_batch(1), random_batch(1)
    outside = dirty["policy_mask"] == 0
    for field in ("logp", "old_logp", "rollout_logp", "advantages"):
        dirty[field] = torch.where(outside, poison, dirty[field])
    grads = []
    for batch in (clean, dirty):
        batch["logp"] = batch["logp"].detach().requires_grad_()
        found = loss(**batch)
        aggregate(found.token_loss, batch["loss_mask"], "token_mean").backward()
        grads.append((found.token_loss.detach(), batch["logp"].grad, torch.stack(list(found.metrics.values())[:-1])))
    for one, other in zip(*grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert (grads[1][1][outside] == 0).all()
    weights = corrections.tis(dirty["old_logp"], dirty["rollout_logp"], dirty["policy_mask"])
    assert torch.isfinite(weights).all() and (weights[outside] == 0).all()


@pytest.mark.parametrize("name", ["token", "ctpo"])
@pytest.mark.parametrize("field", ["logp", "old_logp", "advantages"])
def test_a_nan_at_mask_one_surfaces(name, field):
    batch = random_batch(1)
    batch[field][1, 0] = math.nan
    found = getattr(policy_losses, name)(**batch)
    assert torch.isnan(aggregate(found.token_loss, batch["loss_mask"], "token_mean"))


def test_dropping_a_token_from_the_loss_changes_no_other_tokens_loss():
    batch = random_batch(2)
    whole = policy_losses.ctpo(**(batch | {"loss_mask": batch["policy_mask"]})).token_loss
    part = policy_losses.ctpo(**batch).token_loss
    kept = batch["loss_mask"] > 0
    torch.testing.assert_close(part[kept], whole[kept], rtol=0, atol=0)
    assert (part[~kept] == 0).all()


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), pad=st.integers(0, 5))
def test_padding_row_order_and_tool_tokens_do_not_change_a_loss(seed, pad):
    batch = random_batch(seed)
    plain = policy_losses.ctpo(**batch).token_loss
    order = torch.randperm(4, generator=torch.Generator().manual_seed(seed))
    noise = torch.Generator().manual_seed(seed + 1)
    changed = {}
    for name, value in batch.items():
        value = value[order]
        if "mask" not in name:
            tool = batch["policy_mask"][order] == 0
            value = torch.where(tool, torch.randn(value.shape, generator=noise, dtype=value.dtype), value)
        changed[name] = torch.nn.functional.pad(value, (0, pad))
    found = policy_losses.ctpo(**changed).token_loss
    torch.testing.assert_close(found[:, :12], plain[order], rtol=0, atol=0)


def test_fresh_batch_has_ratio_one_everywhere():
    batch = random_batch(0)
    found = policy_losses.ctpo(**(batch | {"old_logp": batch["logp"].clone()}))
    assert found.metrics["ratio/max"] == 1 and found.metrics["ratio/clip_fraction"] == 0
    assert found.metrics["ratio/ess"] == 1
    expected = torch.where(batch["loss_mask"] > 0, -batch["advantages"], 0.0)
    torch.testing.assert_close(found.token_loss, expected)


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


def test_half_precision_logs_are_summed_in_float32():
    batch = {name: value.to(torch.bfloat16) for name, value in random_batch(0).items()}
    assert policy_losses.ctpo(**batch).token_loss.dtype == torch.float32


def test_tis_is_detached_truncated_and_bounded():
    batch = random_batch(0)
    batch["old_logp"].requires_grad_()
    weight = corrections.tis(batch["old_logp"], batch["rollout_logp"] - 100, batch["policy_mask"])
    assert not weight.requires_grad and weight.max() == 2
    sequence = corrections.tis(batch["old_logp"], batch["rollout_logp"] + 100, batch["policy_mask"], 5.0, "sequence")
    torch.testing.assert_close(sequence, torch.full((4,), math.exp(-20.0), dtype=torch.float64))
    with pytest.raises(ValueError, match="unknown level"):
        corrections.tis(batch["old_logp"], batch["rollout_logp"], batch["policy_mask"], level="word")
