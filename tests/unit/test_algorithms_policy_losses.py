"""Every policy loss against its equation: values, the gradient that its stop-gradients state, masks and invariances."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.algorithm_references import FIELDS, Batch, poisoned, recorded_batch, reference, stated_gradient
from toolrl.algorithms import aggregate, policy_losses

LOSSES: dict[str, list[dict[str, Any]]] = {
    "token": [{}, {"clip_high": 0.28}, {"clip_low": 0.05, "clip_high": 0.05, "dual_clip": 1.1}],
    "gspo": [{}, {"clip_low": 0.02, "clip_high": 0.03}],
    "steppo": [{}, {"clip_low": 0.02, "clip_high": 0.03}],
    "cispo": [{}, {"clip_low": 0.05, "clip_high": 0.05}],
    "cppo": [{}, {"delta": 0.03, "w_min": 0.5}],
    "ctpo": [{}, {"dual_clip": None}, {"power": 0.0}, {"space": "ratio", "clip_low": 0.1, "clip_high": 0.1}],
}
CASES = [(name, options) for name, all_options in LOSSES.items() for options in all_options]
HOWS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm")
SETTINGS = settings(max_examples=15, deadline=None)


def run(name: str, batch: Batch, **options: Any) -> policy_losses.PolicyLoss:
    wanted = {key: value for key, value in batch.items() if key != "turn_ids" or name == "steppo"}
    loss: policy_losses.PolicyLoss = getattr(policy_losses, name)(**wanted, **options)
    return loss


@pytest.mark.parametrize(("name", "options"), CASES)
def test_a_loss_equals_its_equation_and_its_gradient_the_stopped_equations_differences(name, options):
    for seed, step in ((0, 0.03), (1, 0.1), (2, 0.5)):
        batch = recorded_batch(seed, step=step)
        dirty = poisoned(batch)
        dirty["logp"].requires_grad_()
        found = run(name, dirty, **options).token_loss
        expected = np.asarray(reference(name, batch, **options))
        np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-12, atol=1e-14)
        found.sum().backward()
        slopes = stated_gradient(name, batch, **options)
        np.testing.assert_allclose(dirty["logp"].grad.numpy(), slopes, rtol=1e-6, atol=1e-8)
        assert (dirty["logp"].grad[batch["loss_mask"] == 0] == 0).all()


@pytest.mark.parametrize(("name", "options"), CASES)
def test_the_cases_reach_both_sides_of_every_clip(name, options):
    """What the test above compares is not all clipped or all free."""
    shares = [
        float(run(name, recorded_batch(seed, step=step), **options).metrics["ratio/clip_fraction"])
        for seed, step in ((0, 0.03), (1, 0.1), (2, 0.5))
    ]
    wide = name == "cispo" and not options
    assert min(shares) < 0.9 and (wide or max(shares) > 0)


def test_cispo_keeps_the_gradient_where_its_weight_is_clipped():
    logp, old = torch.tensor([[-0.1]]).double().requires_grad_(), torch.tensor([[-5.1]]).double()
    found = policy_losses.cispo(logp, old, torch.ones(1).double(), torch.ones(1, 1))
    found.token_loss.sum().backward()
    assert logp.grad.item() == -6.0 and found.metrics["ratio/clip_fraction"] == 1  # 1 + ε_high


def test_gspo_with_its_aggregation_has_the_gradient_of_the_sequence_form():
    """Mean over trajectories of −min(sA, clip(s)A), the gradient through s, where A is one number a trajectory."""
    batch = recorded_batch(4, step=0.02)
    batch["loss_mask"] = batch["policy_mask"]
    advantages = torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def sequence_form(x: torch.Tensor) -> torch.Tensor:
        mask = batch["policy_mask"]
        s = torch.exp(((x - batch["old_logp"]) * mask).sum(-1) / mask.sum(-1))
        return -torch.minimum(s * advantages, s.clamp(1 - 3e-3, 1 + 4e-3) * advantages).mean()

    gradients = []
    for token_form in (True, False):
        logp = batch["logp"].clone().requires_grad_()
        options = {"clip_low": 3e-3, "clip_high": 4e-3}
        found = run("gspo", batch | {"logp": logp, "advantages": advantages}, **options).token_loss
        loss = aggregate(found, batch["policy_mask"], "seq_mean_token_mean") if token_form else sequence_form(logp)
        loss.backward()
        gradients.append((loss.detach(), logp.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=1e-15)
    assert torch.autograd.gradcheck(sequence_form, (batch["logp"].clone().requires_grad_(),))


def test_steppo_keeps_two_turns_apart_that_nothing_separates():
    """A tool that returned nothing: runs of the mask would merge the turns, the recorded ones do not."""
    mask, old = torch.ones(1, 3).double(), torch.zeros(1, 3).double()
    logp = torch.tensor([[0.1, 0.3, -0.2]], dtype=torch.float64)
    turns = torch.tensor([[0, 0, 1]])
    found = policy_losses.steppo(logp, old, -torch.ones(1).double(), mask, turn_ids=turns, clip_high=9.0)
    expected = [math.exp(0.2), math.exp(0.2), math.exp(-0.2)]  # as one turn all would be exp(.2/3)
    np.testing.assert_allclose(found.token_loss[0], expected, rtol=1e-12)


def test_steppo_without_turns_says_what_is_missing():
    batch = recorded_batch(0)
    del batch["turn_ids"]
    with pytest.raises(ValueError, match="turn_ids"):
        policy_losses.steppo(**batch)


def test_cppo_takes_the_trainers_old_weights_for_the_engines_where_there_are_none():
    batch = recorded_batch(0)
    same = run("cppo", batch | {"rollout_logp": batch["old_logp"]}).token_loss
    alone = run("cppo", {name: value for name, value in batch.items() if name != "rollout_logp"}).token_loss
    torch.testing.assert_close(alone, same, rtol=0, atol=0)


def test_a_dual_clip_that_would_cut_tokens_which_have_not_moved_is_refused():
    batch = recorded_batch(0)
    with pytest.raises(ValueError, match="dual_clip=1"):
        run("token", batch, dual_clip=1)
    torch.testing.assert_close(
        run("token", batch, dual_clip=True).token_loss, run("token", batch, dual_clip=3.0).token_loss
    )
    torch.testing.assert_close(run("token", batch, dual_clip=False).token_loss, run("token", batch).token_loss)


@pytest.mark.parametrize("name", LOSSES)
def test_a_nan_at_a_policy_token_surfaces(name):
    for field in ("logp", "advantages", "rollout_logp" if name == "cppo" else "old_logp"):
        batch = recorded_batch(3)
        i, t = next(iter(zip(*np.nonzero(batch["loss_mask"].numpy()), strict=True)))
        batch[field] = batch[field].clone()
        batch[field][i, t] = math.nan
        assert torch.isnan(aggregate(run(name, batch).token_loss, batch["loss_mask"], "token_mean")), field


@pytest.mark.parametrize("name", ["gspo", "steppo", "ctpo", "cppo"])
def test_a_nan_at_a_policy_token_out_of_the_loss_surfaces_in_the_tokens_whose_ratio_holds_it(name):
    mask = torch.ones(2, 4).double()
    batch = {field: -torch.ones(2, 4).double() for field in FIELDS} | {"policy_mask": mask, "loss_mask": mask.clone()}
    batch["turn_ids"] = torch.zeros(2, 4)
    batch["loss_mask"][0, 1] = 0
    batch["logp"] = batch["logp"].clone()
    batch["logp"][0, 1] = math.nan
    lost = run(name, batch).token_loss.isnan().tolist()
    assert lost == [[name != "ctpo", False, True, True], [False] * 4]


def test_cppos_only_token_of_a_trajectory_weighs_one():
    pi, mu, one = torch.tensor([[0.5]]).double(), torch.tensor([[0.33]]).double(), torch.ones(1, 1).double()
    found = policy_losses.cppo(pi.log(), mu.log(), one, one, rollout_logp=mu.log())
    assert found.token_loss.item() == 0  # D = .17 > δ = .15; w_min · D would pass


@pytest.mark.parametrize("name", LOSSES)
def test_dropping_tokens_from_the_loss_changes_no_other_tokens_loss(name):
    batch = recorded_batch(5)
    whole = run(name, batch | {"loss_mask": batch["policy_mask"]}).token_loss
    part = run(name, batch).token_loss
    kept = batch["loss_mask"] > 0
    torch.testing.assert_close(part[kept], whole[kept], rtol=0, atol=0)
    assert (part[~kept] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
def test_fresh_samples_have_ratio_one_and_nothing_is_clipped(name):
    batch = recorded_batch(6)
    fresh = batch | {"old_logp": batch["logp"], "rollout_logp": batch["logp"]}
    found = run(name, fresh)
    assert found.metrics["ratio/clip_fraction"] == 0 and found.metrics["ratio/max"] == 1
    if name != "cispo":
        expected = torch.where(batch["loss_mask"] > 0, -batch["advantages"], 0.0)
        torch.testing.assert_close(found.token_loss, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", LOSSES)
@SETTINGS
@given(seed=st.integers(0, 10_000), pad=st.integers(0, 4))
def test_padding_row_order_and_tool_tokens_change_nothing(name, seed, pad):
    batch = recorded_batch(seed)
    batch["logp"].requires_grad_()
    plain = run(name, batch).token_loss
    plain.sum().backward()
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    fills = {"turn_ids": -1, "policy_mask": 0, "loss_mask": 0}
    changed = {
        key: torch.nn.functional.pad(value.detach()[order], (0, pad), value=fills.get(key, math.nan))
        for key, value in poisoned(batch, seed).items()
    }
    changed["logp"].requires_grad_()
    found = run(name, changed).token_loss
    found.sum().backward()
    width = plain.shape[1]
    torch.testing.assert_close(found[:, :width], plain[order], rtol=1e-13, atol=0)
    torch.testing.assert_close(changed["logp"].grad[:, :width], batch["logp"].grad[order], rtol=1e-13, atol=0)
    assert (found[:, width:] == 0).all() and (changed["logp"].grad[:, width:] == 0).all()


@pytest.mark.parametrize("name", LOSSES)
@SETTINGS
@given(seed=st.integers(0, 10_000), how=st.sampled_from(HOWS), cuts=st.sets(st.integers(1, 4)))
def test_micro_batches_with_global_denominators_add_up_to_the_whole(name, seed, how, cuts):
    batch = recorded_batch(seed)
    batch["logp"].requires_grad_()
    mask = batch["loss_mask"]
    whole = aggregate(run(name, batch).token_loss, mask, how)
    (gradient,) = torch.autograd.grad(whole, batch["logp"])
    denominator = {
        "token_mean": float(mask.sum()),
        "seq_mean_token_mean": float((mask.sum(-1) > 0).sum()),
        "seq_mean_token_sum_norm": float(mask.numel()),
    }[how]
    total = torch.zeros((), dtype=torch.float64)
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), 5], strict=True):
        part = {key: value[start:end] for key, value in batch.items()}
        total = total + aggregate(run(name, part).token_loss, part["loss_mask"], how, denominator=denominator)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(torch.autograd.grad(total, batch["logp"])[0], gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", LOSSES)
def test_one_advantage_a_trajectory_is_the_same_as_one_a_token(name):
    batch = recorded_batch(7)
    rows = batch["advantages"][:, 0].clone()
    one = run(name, batch | {"advantages": rows}).token_loss
    each = run(name, batch | {"advantages": rows[:, None].expand_as(batch["logp"])}).token_loss
    torch.testing.assert_close(one, each, rtol=0, atol=0)


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_widened_before_any_sum(name):
    batch = {key: value.to(torch.bfloat16) if key in FIELDS else value for key, value in recorded_batch(0).items()}
    assert run(name, batch).token_loss.dtype == torch.float32
