"""What the learner reads to see whether a tool's result was used, against transformers on the same tokens: log-probabilities with
tokens hidden from those after them, and the attention that later predictions give to chosen tokens."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.attention import NAME
from learner.attention_mass import AttentionProbe, Spans
from learner.packing import model_line, pack
from learner.policy import PolicyModel
from learner.prefixes import Sharing
from learner.sequence import TrainSequence
from tests.unit.test_learner_prefixes import VOCABULARY, causal_lm

PROMPT = 7


def sequence(seed: int, *pieces: int, same: int = 0) -> TrainSequence:
    """Policy turns and tool turns by turns, of these lengths; the first `same` tokens are those of every other one."""
    draw = np.random.default_rng(seed)
    turn_ids = np.concatenate(
        [np.full(size, index // 2 if index % 2 == 0 else -1) for index, size in enumerate(pieces)]
    )
    ids = draw.integers(0, VOCABULARY, PROMPT + len(turn_ids))
    ids[:same] = np.random.default_rng(99).integers(0, VOCABULARY, 200)[:same]
    mask = turn_ids >= 0
    zeros = np.zeros(len(turn_ids), dtype=np.float32)
    return TrainSequence(ids, PROMPT, mask, mask, zeros, zeros, turn_ids.astype(np.int32), temperature=0.7)


def hiding(base: TrainSequence, *spans: tuple[int, int]) -> TrainSequence:
    hidden = np.zeros(len(base.policy_mask), dtype=bool)
    for start, end in spans:
        hidden[start:end] = True
    return replace(base, hidden=hidden)


def plain(model: torch.nn.Module, each: TrainSequence) -> torch.Tensor:
    """[P] log-probabilities by transformers' eager attention with a mask over the hidden tokens."""
    model.set_attn_implementation("eager")
    try:
        ids = torch.from_numpy(each.token_ids)[None]
        seen = np.ones(len(each.token_ids), dtype=np.int64)
        seen[PROMPT:] = 1 if each.hidden is None else ~each.hidden
        place = torch.arange(ids.shape[1])[None]
        logits = model(ids, attention_mask=torch.from_numpy(seen)[None], position_ids=place, use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(NAME)
    logp = (logits / each.temperature).log_softmax(-1)
    where = PROMPT + np.flatnonzero(each.policy_mask)
    return logp[where - 1, torch.from_numpy(each.token_ids[where])]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    return causal_lm(None, torch.float64).eval()


@pytest.mark.parametrize("share", ["on", "off", "auto"])
def test_hidden_tokens_are_seen_by_nobody_and_nothing_else_moves(model: torch.nn.Module, share: Sharing) -> None:
    base = sequence(0, 5, 9, 6, 8, 7, same=30)
    others = [sequence(1, 5, 9, 6, 8, 7, same=30), sequence(2, 12)]
    shifted = hiding(base, (7, 11))
    batch = [base, shifted, hiding(base, (7, 11), (22, 26)), hiding(base, (20, 27)), *others]
    packed = pack(batch, share)
    found = PolicyModel(model, chunk=1000)(packed)[0]
    expected = torch.cat([plain(model, each) for each in batch])
    assert float((found - expected).abs().max()) < 1e-5  # the head computes in float32
    gone = sum(
        int(each.hidden[: np.flatnonzero(each.policy_mask)[-1]].sum()) for each in batch if each.hidden is not None
    )
    assert gone == 4 + 8 + 7
    if share == "off":
        assert packed.input_ids.numel() == sum(len(each.token_ids) - 1 for each in batch) - gone


def test_tokens_behind_a_hole_are_not_taken_for_those_of_a_shorter_sequence() -> None:
    base = sequence(0, 5, 9, 30, same=50)
    shifted = hiding(base, (5, 9))
    ids = np.delete(base.token_ids, slice(PROMPT + 5, PROMPT + 9))
    short = replace(
        base,
        token_ids=ids,
        **{
            name: np.delete(getattr(base, name), slice(5, 9))
            for name in ("policy_mask", "loss_mask", "rollout_logp", "advantages", "turn_ids")
        },
    )
    packed = pack([shifted, short], "on")
    assert (model_line(shifted) & 0xFFFFFFFF).tolist() == model_line(short).tolist()
    assert packed.input_ids.numel() == 2 * len(model_line(short)), (
        "nothing may be shared but the beginning, too short here"
    )


def test_a_policy_token_cannot_be_hidden() -> None:
    with pytest.raises(ValueError, match="policy token is hidden"):
        hiding(sequence(0, 5, 3, 4), (4, 6))


def eager_mass(model: torch.nn.Module, each: TrainSequence, spans: Spans, layer: int) -> tuple[float, float]:
    """From the weights that transformers returns."""
    other = AutoModelForCausalLM.from_config(deepcopy(model.config), attn_implementation="eager", dtype=torch.float64)
    other.load_state_dict(model.state_dict())
    other.eval()
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        if hasattr(mine, "variance_epsilon"):
            theirs.forward = mine.forward
    weights = other(torch.from_numpy(each.token_ids)[None], output_attentions=True, use_cache=False).attentions[layer][
        0
    ]
    rows = PROMPT - 1 + np.flatnonzero(each.policy_mask)
    rows = rows[rows >= PROMPT + max(end for _, end in spans)]
    keys = np.concatenate([np.arange(PROMPT + start, PROMPT + end) for start, end in spans])
    mass = weights.mean(0)[rows][:, keys].sum(1).mean()
    return float(mass), float(np.mean(len(keys) / (rows + 1)))


@pytest.mark.parametrize("window", [None, 16])
def test_attention_mass_is_that_of_eager_attention(window: int | None) -> None:
    model = causal_lm(window, torch.float64).eval()
    batch = [sequence(0, 5, 9, 6, 8, 7), sequence(1, 3, 12, 4), sequence(2, 6)]
    spans: list[list[Spans]] = [[[(6, 12)], [(20, 26), (27, 28)], [(30, 31)]], [[(3, 15)], []], []]
    for layer in (0, 1):
        probe = AttentionProbe(layer, packed := pack(batch, "off"), batch, spans)
        states = PolicyModel(model, chunk=1000)(packed, False, packed.head_rows[:1], True, probe)
        assert len(states) == 1 and [found.shape for found in probe.found] == [(3, 2), (2, 2), (0, 2)]
        expected = [eager_mass(model, batch[0], spans[0][0], layer), eager_mass(model, batch[0], spans[0][1], layer)]
        np.testing.assert_allclose(probe.found[0][:2], expected, atol=1e-6)
        np.testing.assert_allclose(probe.found[1][0], eager_mass(model, batch[1], spans[1][0], layer), atol=1e-6)
        assert np.isnan(probe.found[1][1]).all(), "an empty set of spans has no mass"


def test_no_prediction_behind_a_span_is_no_number() -> None:
    model = causal_lm(None, torch.float64)
    each = sequence(0, 5, 9)
    probe = AttentionProbe(0, packed := pack([each], "off"), [each], [[[(5, 14)]]])
    PolicyModel(model, chunk=1000)(packed, False, packed.head_rows[:1], True, probe)
    assert np.isnan(probe.found[0]).all()
