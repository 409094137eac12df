"""The worked numbers that came with the specification (8 digits)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from toolrl.algorithms import advantages, aggregate, corrections, policy_losses, regularizers

VECTORS: dict[str, Any] = json.loads((Path(__file__).parent / "data" / "vectors.json").read_text())
BATCH = VECTORS["policy_batch"]
CTPO = VECTORS["ctpo"]
DIGITS = 2e-8


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(
        torch.as_tensor(found, dtype=torch.float64).detach(), tensor(expected), atol=DIGITS, rtol=0
    )


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    made = {name: tensor(BATCH[name]) for name in ("logp", "old_logp", "policy_mask")}
    return made | {"advantages": tensor(VECTORS["grpo_advantage"])}


def test_grpo_advantages():
    close(advantages.grpo(BATCH["rewards"]), VECTORS["grpo_advantage"])


def test_rloo_advantages():
    close(advantages.rloo(BATCH["rewards"]), VECTORS["rloo_advantage"])


def test_steppo_advantages():
    given = VECTORS["steppo"]
    inputs = (given["rewards"], given["values"], given["gamma"], given["lam"])
    for row, expected in zip(advantages.steppo(*inputs, whiten=False), given["gae"], strict=True):
        close(row, expected)
    for row, expected in zip(advantages.steppo(*inputs), given["whitened ddof1"], strict=True):
        close(row, expected)


def test_lambda_returns():
    given = VECTORS["lambda_return"]
    found = advantages.lambda_return(given["rewards"], given["values"], given["gamma"], given["lam"])
    close(found, given["returns"])


@pytest.mark.parametrize("dual", [True, False])
@pytest.mark.parametrize("how", ["token_mean", "seq_mean_token_mean"])
def test_ctpo_loss(batch, dual, how):
    loss = policy_losses.ctpo(**batch, dual_clip=0.05 if dual else None).token_loss
    close(aggregate(loss, batch["policy_mask"], how), CTPO[f"loss dual_clip={dual} {how}"])


def test_ctpo_tokens_and_gradient(batch):
    logp = batch.pop("logp").requires_grad_()
    loss = policy_losses.ctpo(logp, **batch).token_loss
    close(loss, CTPO["token_loss"])
    aggregate(loss, batch["policy_mask"], "token_mean").backward()
    close(logp.grad, CTPO["grad_wrt_logp_token_mean"])


@pytest.mark.parametrize("power", [0, -0.5])
def test_ctpo_power(batch, power):
    loss = policy_losses.ctpo(**batch, power=power).token_loss
    close(aggregate(loss, batch["policy_mask"], "token_mean"), CTPO[f"loss power={power} token_mean"])


def test_ctpo_tokens_dropped_from_the_loss_stay_in_the_ratio(batch):
    loss_mask = batch["policy_mask"].clone()
    loss_mask[0, 1] = loss_mask[1, 0] = 0
    loss = policy_losses.ctpo(**batch, loss_mask=loss_mask).token_loss
    close(aggregate(loss, loss_mask, "token_mean"), CTPO["loss when loss_mask drops (0,1) and (1,0), token_mean"])


def test_sequence_tis_on_ctpo(batch):
    rollout = tensor(BATCH["rollout_logp"])
    weight = corrections.tis(batch["old_logp"], rollout, batch["policy_mask"], 5.0, "sequence")
    close(weight, CTPO["sequence_tis_weight_cap5"])
    loss = policy_losses.ctpo(**batch).token_loss * weight[:, None]
    close(aggregate(loss, batch["policy_mask"], "token_mean"), CTPO["loss_with_sequence_tis token_mean"])


def test_token_tis(batch):
    weight = corrections.tis(batch["old_logp"], tensor(BATCH["rollout_logp"]), batch["policy_mask"])
    close(weight, VECTORS["tis"]["token cap 2"])


@pytest.mark.parametrize(("name", "low", "high"), [("clip .2/.2", 0.2, 0.2), ("clip .02/.028", 0.02, 0.028)])
def test_token_loss(batch, name, low, high):
    loss = policy_losses.token(**batch, clip_low=low, clip_high=high).token_loss
    close(aggregate(loss, batch["policy_mask"], "token_mean"), VECTORS["token"][f"{name} token_mean"])


def test_gspo_loss(batch):
    loss = policy_losses.gspo(**batch).token_loss
    close(aggregate(loss, batch["policy_mask"], "seq_mean_token_mean"), VECTORS["gspo"]["loss"])


def test_cppo_tokens():
    given = VECTORS["cppo"]
    logp, mu = tensor([given["pi"]]).log(), tensor([given["mu"]]).log()
    found = policy_losses.cppo(logp, mu, tensor([given["A"]]), torch.ones(1, 5), rollout_logp=mu)
    close(found.token_loss[0], given["loss"])
    assert found.metrics["ratio/clip_fraction"] == 1 - sum(given["keep"]) / 5


def test_icepop_weights(batch):
    weight = corrections.icepop(batch["old_logp"], tensor(BATCH["rollout_logp"]), batch["policy_mask"])
    close(weight, VECTORS["icepop"])


def test_gtpo_outcome_and_normalisations():
    given = VECTORS["gtpo"]
    close(advantages.gtpo_outcome(given["correct"], given["embeddings"]), given["outcome alpha=.5"])
    for normalize in ("pooled", "per_turn", "first_return"):
        found = advantages.gtpo(given["turn_rewards"], 0.9, normalize)
        for row, expected in zip(found, given[normalize], strict=True):
            close(row, expected)


@pytest.mark.parametrize(
    ("key", "options"),
    [
        ("gate=turn norm=preserved", {}),
        ("gate=response norm=preserved", {"gate": "response"}),
        ("gate=token norm=preserved", {"gate": "token"}),
        ("gate=turn norm=all", {"normalize": "all"}),
        ("gate=turn norm=preserved answer beta=.5", {"answer_weight": 0.5}),
    ],
)
def test_llds(key, options):
    given = VECTORS["llds"]
    inputs = [tensor(given[name]) for name in ("logp", "old_logp", "policy_mask", "advantage", "turn_id")]
    if "answer_weight" in options:
        options = options | {"answer_mask": tensor(given["answer_span"])}
    close(regularizers.llds(*inputs, **options), given[key])
