"""Common beginnings are found in the ids and read once; log-probabilities and gradients are those of separate rows."""

from __future__ import annotations

import itertools
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, MistralConfig, Qwen3Config

import learner.attention
from learner.attention import NAME
from learner.masked_attention import masked_attention
from learner.packing import PackedBatch, model_line, pack
from learner.planning import plan_micro_batches
from learner.policy import PolicyModel
from learner.prefixes import PrefixOrder, Sharing, sharing_on
from learner.sequence import TrainSequence

VOCABULARY = 97


def sequence(ids: np.ndarray, prompt: int, draw: np.random.Generator) -> TrainSequence:
    """Policy tokens and tool tokens at random; the last is the policy's."""
    response = len(ids) - prompt
    mask = draw.random(response) < 0.7
    mask[-1] = True
    zeros = np.zeros(response, dtype=np.float32)
    advantages = np.where(mask, draw.normal(0, 1, response), 0).astype(np.float32)
    turns = np.where(mask, 0, -1).astype(np.int32)
    return TrainSequence(ids, prompt, mask, mask, zeros, advantages, turns, temperature=0.7)


def batch_of_families(seed: int = 1) -> list[TrainSequence]:
    """A group with a branch whose long prefix holds policy tokens, one with a hint before some prompts, one that shares
    too little, a lone sequence, a repeated one, and one that is the beginning of another."""
    draw = np.random.default_rng(seed)

    def tokens(size: int) -> np.ndarray:
        return draw.integers(0, VOCABULARY, size)

    prompt, branch, hint, task = tokens(50), tokens(20), tokens(17), tokens(30)
    made = [sequence(np.r_[prompt, tokens(draw.integers(5, 30))], 50, draw) for _ in range(3)]
    made += [sequence(np.r_[prompt, branch, tokens(draw.integers(5, 30))], 50, draw) for _ in range(3)]
    made += [sequence(np.r_[task, tokens(9)], 30, draw) for _ in range(2)]
    made += [sequence(np.r_[hint, task, tokens(9)], 47, draw) for _ in range(2)]
    made += [sequence(np.r_[task[:3], tokens(12)], 3, draw), sequence(tokens(25), 6, draw)]
    made += [made[1], sequence(made[2].token_ids[:56].copy(), 50, draw)]
    return [made[index] for index in draw.permutation(len(made))]


def causal_lm(window: int | None, dtype: torch.dtype) -> torch.nn.Module:
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "initializer_range": 0.3,
    }
    config = MistralConfig(**shape, sliding_window=window) if window else Qwen3Config(**shape)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=NAME)
    if dtype == torch.float64:  # transformers' own norm computes in float32
        for norm in (module for module in model.modules() if hasattr(module, "variance_epsilon")):
            norm.forward = partial(torch.nn.functional.rms_norm, normalized_shape=norm.weight.shape, weight=norm.weight)
    return model


def head_inputs(model: torch.nn.Module, batch: PackedBatch) -> torch.Tensor:
    """[M, hidden] in the model's own precision: what the head reads."""
    states = model.base_model(
        input_ids=batch.input_ids, position_ids=batch.position_ids, packed_layout=batch.layout, use_cache=False
    ).last_hidden_state[0]
    return states.index_select(0, batch.head_rows)


def run(model: torch.nn.Module, batches: list[PackedBatch]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """(the head's inputs of all batches, gradients of a fixed random function of them)."""
    model.zero_grad()
    states = torch.cat([head_inputs(model, batch) for batch in batches])
    slopes = torch.randn(states.shape, generator=torch.Generator().manual_seed(0)).to(states.dtype)
    (states * slopes).sum().backward()
    found = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return states.detach(), found


@pytest.fixture(params=["joined", "masked"])
def kernel(request, monkeypatch):
    """The CPU's path, and the one that other devices take."""
    if request.param == "masked":
        stand_in = type("Masked", (), {"apply": staticmethod(masked_attention)})
        monkeypatch.setattr(learner.attention, "_JoinedAttention", stand_in)
    return request.param


@pytest.mark.parametrize("window", [None, 24])
def test_shared_prefixes_give_the_values_and_gradients_of_separate_rows(kernel, window):
    model = causal_lm(window, torch.float64)
    sequences = batch_of_families()
    shared = pack(sequences, "on")
    alone = [pack([each], "off") for each in sequences]
    assert shared.input_ids.numel() < 0.6 * sum(batch.input_ids.numel() for batch in alone)
    assert any(a.end <= b.begin and b.reach <= a.reach for a, b in itertools.permutations(shared.layout.spans, 2)), (
        "a branch's prefix continues its group's"
    )
    ours, our_slopes = run(model, [shared])
    theirs, their_slopes = run(model, alone)
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=1e-12)
    for mine, other in zip(our_slopes, their_slopes, strict=True):
        torch.testing.assert_close(mine, other, atol=1e-12 * float(other.abs().max()), rtol=1e-11)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-5), (torch.bfloat16, 0.15)])
def test_log_probabilities_agree_within_the_rounding_of_the_dtype(dtype, bound):
    model = causal_lm(None, dtype)
    policy = PolicyModel(model, chunk=64)
    sequences = batch_of_families()
    with torch.no_grad():
        ours, entropy = policy(pack(sequences, "on"))
        theirs, other = policy(pack(sequences, "off"))
        exact = PolicyModel(causal_lm(None, torch.float64), chunk=64)
        exact.load_state_dict({name: value.double() for name, value in policy.state_dict().items()})
        truth = exact(pack(sequences, "off"))[0]
    assert ours.dtype == torch.float32
    assert float((ours - theirs).abs().mean()) <= bound and float((entropy - other).abs().mean()) <= bound
    assert float((ours - truth).abs().mean()) <= 1.2 * float((theirs - truth).abs().mean()) + 1e-7, (
        "sharing adds no error of its own"
    )


def test_a_shared_policy_token_has_the_loss_of_every_sequence_that_holds_it():
    """Two branches with one history that holds policy tokens, with opposite advantages: their losses cancel there."""
    draw = np.random.default_rng(0)
    history = draw.integers(0, VOCABULARY, 40)
    pair = [sequence(np.r_[history, draw.integers(0, VOCABULARY, 4)], 10, draw) for _ in range(2)]
    for each in pair:
        each.policy_mask[:] = each.loss_mask[:] = True
    batch = pack(pair, "on")
    assert batch.input_ids.numel() == 40 + 3 + 3
    policy = PolicyModel(causal_lm(None, torch.float32), chunk=64)
    grid = batch.grid(policy(batch)[0])
    assert torch.equal(grid[0, :30], grid[1, :30]) and not torch.equal(grid[0, 30:], grid[1, 30:])
    ((grid[0, :30] - grid[1, :30]) * torch.arange(1.0, 31)).sum().backward()
    assert all(p.grad is None or float(p.grad.abs().max()) < 1e-5 for p in policy.parameters())
    policy.zero_grad()
    policy_grid = batch.grid(policy(batch)[0])
    (3 * policy_grid[0, :30] + policy_grid[1, :30]).sum().backward()
    with_both = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    alone = pack(pair[:1], "off")
    (4 * alone.grid(policy(alone)[0])[0, :30]).sum().backward()
    for ours, parameter in zip(with_both, policy.parameters(), strict=True):
        bound = 2e-5 * float(parameter.grad.abs().max())
        torch.testing.assert_close(ours, parameter.grad, atol=bound, rtol=1e-4)


def test_sequences_of_one_group_with_differing_prefixes_are_scored_with_their_own():
    draw = np.random.default_rng(0)
    task = draw.integers(0, VOCABULARY, 40)
    hinted = np.r_[draw.integers(0, VOCABULARY, 8), task]
    group = [sequence(np.r_[p, draw.integers(0, VOCABULARY, 9)], len(p), draw) for p in (task, hinted, task)]
    for each in group:
        each.group_id = "one"
    batch = pack(group, "on")
    assert batch.input_ids.numel() == 40 + 8 + 8 + 56
    policy = PolicyModel(causal_lm(None, torch.float32), chunk=64)
    with torch.no_grad():
        together = batch.grid(policy(batch)[0])
        for row, each in enumerate(group):
            alone = pack([each], "off")
            torch.testing.assert_close(together[row], alone.grid(policy(alone)[0])[0], atol=2e-5, rtol=1e-5)


def test_what_is_short_or_saves_little_is_not_shared_unless_asked():
    draw = np.random.default_rng(0)
    prompt = draw.integers(0, VOCABULARY, 20)
    pair = [sequence(np.r_[prompt, draw.integers(0, VOCABULARY, 300)], 20, draw) for _ in range(2)]
    sizes = {share: pack(pair, share).input_ids.numel() for share in ("off", "auto", "on")}
    assert sizes["auto"] == sizes["off"] == sizes["on"] + 20
    for each in pair:
        each.token_ids[10] = draw.integers(0, VOCABULARY)
    assert pack(pair, "on").input_ids.numel() == sizes["off"], "less than the shortest prefix is in common"


def test_auto_means_off_where_no_measurement_speaks_for_it():
    assert sharing_on(torch.device("cuda"), "auto") == "off"
    assert sharing_on(torch.device("cpu"), "auto") == "auto"
    assert sharing_on(torch.device("cuda"), "on") == "on"


def tokens_read(lines: list[np.ndarray], part: list[int], share: Sharing = "auto") -> int:
    return PrefixOrder([lines[index] for index in part], share).tree.tokens


LINES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=60).map(np.asarray), min_size=1, max_size=12)


@settings(max_examples=50, deadline=None)
@given(lines=LINES, repeats=st.integers(1, 20), share=st.sampled_from(["auto", "on", "off"]))
def test_the_tree_holds_every_sequence_and_only_shares_what_is_equal(lines, repeats, share):
    lines = [np.repeat(line, repeats) for line in lines]
    order = PrefixOrder(lines, share)
    tree = order.tree
    for index, line in enumerate(lines):
        chain = [tree.segments[at] for at in tree.chain(index)]
        assert np.array_equal(np.concatenate([lines[s.holder][s.start : s.end] for s in chain]), line)
        assert [s.start for s in chain] == [0, *(s.end for s in chain[:-1])]
    assert all(segment.size > 0 for segment in tree.segments)
    assert tree.tokens <= sum(map(len, lines))
    places = list(range(0, len(lines), 2))
    some = [lines[index] for index in order.order[places]]
    assert order.tokens(places) == PrefixOrder(some, share).tree.tokens


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 9)), min_size=1, max_size=8),
    ranks=st.integers(1, 4),
    cap=st.integers(1, 1500),
    share=st.sampled_from(["auto", "on", "off"]),
)
def test_a_plan_with_families_keeps_the_cap_in_tokens_that_are_read(sizes, ranks, cap, share):
    draw = np.random.default_rng(0)
    lines = []
    for prompt, count in sizes:
        shared = draw.integers(0, VOCABULARY, prompt)
        lines += [np.r_[shared, draw.integers(0, VOCABULARY, draw.integers(1, 90))] for _ in range(count)]
    plan = plan_micro_batches(PrefixOrder(lines, share), ranks=ranks, max_tokens=cap)
    shares = [part for micro_batch in plan for part in micro_batch]
    assert all(len(micro_batch) == ranks for micro_batch in plan)
    assert sorted(index for part in shares for index in part) == list(range(len(lines)))
    assert all(len(part) <= 1 or tokens_read(lines, part, share) <= cap for part in shares)
    assert plan == plan_micro_batches(PrefixOrder(lines, share), ranks=ranks, max_tokens=cap)


def test_three_families_on_two_ranks_are_even_and_repeat_one_prefix():
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(3):
        shared = draw.integers(0, VOCABULARY, 250)
        lines += [np.r_[shared, draw.integers(0, VOCABULARY, 55)] for _ in range(8)]
    order = PrefixOrder(lines, "auto")
    ((first, second),) = plan_micro_batches(order, ranks=2, max_tokens=10_000)
    loads = [tokens_read(lines, first), tokens_read(lines, second)]
    assert sum(loads) == 3 * (250 + 8 * 55) + 250
    assert max(loads) - min(loads) <= 250 and max(loads) < 2 * (250 + 8 * 55)


def test_families_stay_whole_where_they_fill_the_ranks_evenly():
    draw = np.random.default_rng(0)
    lines = []
    for _ in range(4):
        shared = draw.integers(0, VOCABULARY, 250)
        lines += [np.r_[shared, draw.integers(0, VOCABULARY, 55)] for _ in range(8)]
    order = PrefixOrder(lines, "auto")
    plan = plan_micro_batches(order, ranks=2, max_tokens=10_000)
    assert sum(tokens_read(lines, part) for micro_batch in plan for part in micro_batch) == order.tree.tokens


def test_the_line_of_a_sequence_ends_before_its_last_policy_token():
    draw = np.random.default_rng(0)
    each = sequence(draw.integers(0, VOCABULARY, 12), 4, draw)
    each.policy_mask[:] = [True, False, True, False, False, False, False, False]
    assert len(model_line(each)) == 6
