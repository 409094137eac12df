"""Packed, chunked log-probabilities against plain ones on separate rows of a tiny Qwen3."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from learner.layout import PackedLayout
from learner.logprobs import token_logprobs
from learner.norms import quicken
from learner.packing import pack
from learner.policy import PolicyModel, check_exact, load_policy
from learner.sequence import TrainSequence
from tests.unit.learner_fixtures import random_sequences
from toolrl.app.tiny_model import write_tiny_model

ROUNDING = {"atol": 3e-6, "rtol": 1e-5}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, 0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():  # sharper than at birth, so that attention and logits matter
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(4)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def plain(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager")


def separate(model, sequence: TrainSequence) -> tuple[torch.Tensor, torch.Tensor]:
    """([R] log-probabilities, [R] entropies) by the textbook: one row, whole logits."""
    ids = torch.from_numpy(np.asarray(sequence.token_ids))[None]
    logits = model(input_ids=ids, use_cache=False).logits[0, sequence.prompt_length - 1 : -1] / sequence.temperature
    logs = logits.float().log_softmax(-1)
    wanted = ids[0, sequence.prompt_length :, None]
    return logs.gather(1, wanted).squeeze(1), -(logs.exp() * logs).sum(-1)


def grids(policy: PolicyModel, sequences: list[TrainSequence]) -> tuple[torch.Tensor, torch.Tensor]:
    batch = pack(sequences)
    logp, entropy = policy(batch)
    return batch.grid(logp), batch.grid(entropy)


@pytest.mark.parametrize("chunk", [7, 10_000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_packed_and_chunked_equals_separate_rows_with_the_same_gradient(model_dir, plain, chunk, temperature):
    policy = load_policy(model_dir, dtype="float32", chunk=chunk)
    sequences = random_sequences(9, temperature=temperature, longest=60)
    logp, entropy = grids(policy, sequences)
    weights = torch.randn(logp.shape, generator=torch.Generator().manual_seed(0))
    (logp * weights).sum().backward()

    plain.zero_grad()
    total = torch.zeros(())
    for row, sequence in enumerate(sequences):
        expected, expected_entropy = separate(plain, sequence)
        mask = torch.from_numpy(sequence.policy_mask)
        size = min(len(mask), logp.shape[1])
        mask = mask[:size]
        torch.testing.assert_close(logp[row, :size][mask], expected[:size][mask], **ROUNDING)
        torch.testing.assert_close(entropy[row, :size][mask], expected_entropy[:size][mask], atol=1e-5, rtol=1e-5)
        assert (logp[row, :size][~mask] == 0).all()
        total = total + (expected[:size] * weights[row, :size])[mask].sum()
    total.backward()
    for (name, ours), theirs in zip(policy.causal_lm.named_parameters(), plain.parameters(), strict=True):
        scale = theirs.grad.abs().max()
        torch.testing.assert_close(ours.grad, theirs.grad, atol=2e-5 * float(scale), rtol=1e-4, msg=name)


def test_packing_order_and_company_do_not_change_a_sequence(model_dir):
    policy = load_policy(model_dir, dtype="float32", chunk=64)
    sequences = random_sequences(6)
    together, _ = grids(policy, sequences)
    backwards, _ = grids(policy, sequences[::-1])
    alone, _ = grids(policy, sequences[2:3])
    width = alone.shape[1]
    torch.testing.assert_close(together[2, :width], alone[0], **ROUNDING)
    torch.testing.assert_close(together[2], backwards[3], **ROUNDING)


def test_the_same_packed_batch_gives_the_same_bits(model_dir):
    policy = load_policy(model_dir, dtype="float32", chunk=64)
    batch = pack(random_sequences(6))
    with torch.no_grad():
        first = policy(batch)[0]
    assert torch.equal(first, policy(batch)[0].detach())


def test_temperatures_may_differ_within_a_batch(model_dir, plain):
    policy = load_policy(model_dir, dtype="float32", chunk=64)
    sequences = [random_sequences(1, seed=k, temperature=t)[0] for k, t in enumerate((0.5, 1.0, 1.5))]
    logp, _ = grids(policy, sequences)
    for row, sequence in enumerate(sequences):
        size = int(np.flatnonzero(sequence.policy_mask)[-1]) + 1
        mask = torch.from_numpy(sequence.policy_mask[:size])
        expected, _ = separate(plain, sequence)
        torch.testing.assert_close(logp[row, :size][mask], expected[:size][mask], **ROUNDING)


def test_more_pieces_than_rows_change_nothing(model_dir):
    """A rank with few rows cuts them as often as the one with most."""
    policy = load_policy(model_dir, dtype="float32", chunk=64)
    batch = pack(random_sequences(1))
    whole = policy(batch)[0]
    batch.head_pieces = len(batch.targets) + 3
    cut = policy(batch)[0]
    torch.testing.assert_close(cut, whole, **ROUNDING)
    cut.sum().backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in policy.parameters())


def test_an_empty_share_runs_and_has_a_gradient_of_zero(model_dir):
    policy = load_policy(model_dir, dtype="float32", chunk=64)
    batch = pack([])
    logp, _ = policy(batch)
    assert not batch.policy_mask.any()
    (batch.grid(logp) * batch.loss_mask).sum().backward()
    assert all((parameter.grad == 0).all() for parameter in policy.parameters())


def test_buckets_bound_the_padding_and_keep_every_token():
    lengths = [10, 4000, 990, 3900, 1000, 10]
    layout = PackedLayout.of(lengths)
    assert sorted(layout.home.tolist()) == sorted(set(layout.home.tolist())) and len(layout.home) == sum(lengths)
    assert sum(bucket.rows for bucket in layout.buckets) == len(lengths)
    cells = sum(bucket.rows * bucket.width for bucket in layout.buckets)
    assert cells < 1.35 * sum(lengths)
    (even,) = PackedLayout.of([7, 7, 7]).buckets
    assert even.tokens is None and (even.rows, even.width) == (3, 7)


def test_entropy_and_logprob_gradients_by_finite_differences():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(11, 5, generator=generator)
    targets = torch.tensor([3, 0, 10, 7])
    scale = torch.tensor([1.0, 0.5, 2.0, 1.3])
    hidden = torch.randn(4, 5, generator=generator, requires_grad=True)

    def value(states: torch.Tensor, pieces: int = 2) -> torch.Tensor:
        logp, entropy = token_logprobs(
            lambda rows: rows @ weight.T,
            states,
            targets,
            inverse_temperature=scale,
            pieces=pieces,
            entropy_gradient=True,
        )
        return (logp * torch.arange(1, 5)).sum() + (entropy * torch.arange(4, 0, -1)).sum()

    value(hidden).backward()
    logs = ((hidden.detach().double() @ weight.T.double()) * scale[:, None]).requires_grad_()
    normal = logs.log_softmax(-1)
    reference = (normal.gather(1, targets[:, None]).squeeze(1) * torch.arange(1, 5)).sum()
    reference = reference - ((normal.exp() * normal).sum(-1) * torch.arange(4, 0, -1)).sum()
    (slope,) = torch.autograd.grad(reference, logs)
    expected = (slope * scale[:, None]) @ weight.double()
    torch.testing.assert_close(hidden.grad.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_token_that_cannot_be_sampled_has_no_nan_entropy():
    logits = torch.tensor([[0.0, -torch.inf, 1.0]])
    logp, entropy = token_logprobs(lambda rows: rows.clone(), logits, torch.tensor([2]))
    expected = torch.tensor([0.0, 1.0]).log_softmax(-1)
    torch.testing.assert_close(logp, expected[1:])
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum()[None])


def test_peak_memory_follows_the_chunk_and_not_the_length():
    """Rows × vocabulary would be 2048 × 5,000 floats = 41 MB; saved tensors must stay far below."""
    weight = torch.randn(5_000, 4, requires_grad=True)
    hidden = torch.randn(2048, 4, requires_grad=True)
    saved = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal saved
        saved += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logp, _ = token_logprobs(lambda rows: rows @ weight.T, hidden, torch.zeros(2048, dtype=torch.long), pieces=16)
    assert saved < 2_000_000
    logp.sum().backward()
    assert torch.isfinite(weight.grad).all()


def test_a_model_that_changes_logits_after_the_head_is_refused(model_dir):
    policy = load_policy(model_dir, dtype="float32", chunk=64)
    head = policy.causal_lm.forward

    def scaled(*arguments, **options):
        output = head(*arguments, **options)
        output.logits = output.logits * 0.5
        return output

    policy.causal_lm.forward = scaled
    with pytest.raises(ValueError, match="packed log-probabilities differ"):
        check_exact(policy, model_dir)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quick_norms_equal_the_models_own_in_value_and_gradient(dtype):
    own, quick = Qwen3RMSNorm(16).to(dtype), Qwen3RMSNorm(16).to(dtype)
    with torch.no_grad():
        own.weight.copy_(torch.linspace(0.5, 2, 16))
        quick.weight.copy_(own.weight)
    assert quicken(torch.nn.ModuleList([quick])) == 1
    x = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    inputs = [x.clone().requires_grad_(), x.clone().requires_grad_()]
    outputs = [own(inputs[0]), quick(inputs[1])]
    slope = torch.randn(5, 3, 16, generator=torch.Generator().manual_seed(1)).to(dtype)
    for output in outputs:
        (output * slope).sum().backward()
    bounds = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.06, "rtol": 0.02}
    torch.testing.assert_close(outputs[1], outputs[0], **bounds)
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **bounds)
    torch.testing.assert_close(quick.weight.grad, own.weight.grad, **bounds)


def test_a_norm_of_another_kind_is_left_alone():
    class ShiftedNorm(Qwen3RMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) * (1 + self.weight)

    assert quicken(torch.nn.ModuleList([ShiftedNorm(8), torch.nn.LayerNorm(8)])) == 0


@pytest.mark.parametrize("pieces", [1, 3])
@pytest.mark.parametrize("gradient", [True, False])
def test_watched_tokens_are_read_on_the_way_and_change_nothing(pieces, gradient):
    generator = torch.Generator().manual_seed(3)
    head = torch.nn.Linear(6, 40, bias=False)
    hidden = torch.randn(11, 6, generator=generator).requires_grad_(gradient)
    targets = torch.randint(40, (11,), generator=generator)
    scale = torch.full((11,), 1 / 0.7)
    watched = torch.tensor([3, 39, 0])
    with torch.set_grad_enabled(gradient):
        plain = token_logprobs(head, hidden, targets, inverse_temperature=scale, pieces=pieces)
        found = token_logprobs(head, hidden, targets, inverse_temperature=scale, pieces=pieces, watched=watched)
    assert len(plain) == 2 and len(found) == 3
    expected = (hidden.double() @ head.weight.double().T / 0.7).log_softmax(-1)[:, watched]
    torch.testing.assert_close(found[2].double(), expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[:2], plain, atol=0, rtol=0)
    if gradient:
        assert not found[2].requires_grad
        gradients = [torch.autograd.grad(each[0].sum(), [hidden, head.weight]) for each in (plain, found)]
        torch.testing.assert_close(gradients[1], gradients[0], atol=0, rtol=0)
