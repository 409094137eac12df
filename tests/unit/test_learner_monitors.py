"""The learner's monitors on a tiny model, against whole distributions in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from learner.control_reading import ControlWatch, control_metrics
from learner.likelihoods import LikelihoodProbe, chosen_sequences, likelihood_metrics
from learner.metrics import Sums
from learner.micro_batches import MicroBatch
from learner.packing import pack
from learner.policy import PolicyModel, load_policy
from learner.sequence import TrainSequence, sequences_from
from tests.unit.monitor_fixtures import CONTROL, episodes, expected_control_metrics, played_sequences, turn_likelihoods
from toolrl.app.tiny_model import write_tiny_model
from toolrl.supervision.guidance import note_guide
from toolrl.trajectory import Turn

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, 0)
    return folder


@pytest.fixture
def policy(model_dir) -> PolicyModel:
    return load_policy(model_dir, dtype="float32", chunk=16)


def in_double(policy: PolicyModel, model_dir) -> AutoModelForCausalLM:
    """The policy as it is now, in float64 and with the model's own attention."""
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float64)
    model.load_state_dict({name: value.double() for name, value in policy.causal_lm.state_dict().items()})
    return model


def micro_batches(sequences: Sequence[TrainSequence], size: int) -> list[MicroBatch]:
    parts = [list(sequences[at : at + size]) for at in range(0, len(sequences), size)]
    return [MicroBatch(list(range(len(part))), part, pack(part)) for part in parts]


def watched(policy: PolicyModel, micros: Sequence[MicroBatch]) -> dict[str, float]:
    sums = Sums()
    watch = ControlWatch(CONTROL, CPU)
    with torch.no_grad():
        for micro in micros:
            _, entropy, seen = policy(micro.batch, watched=watch.ids)
            watch.see(micro, entropy, seen)
    watch.tell(sums)
    return control_metrics(CONTROL, sums)


class Weights:
    """Reads with the policy as it is, as `learner.evidence.Reader` does inside DeepSpeed."""

    def __init__(self, policy: PolicyModel) -> None:
        self.policy = policy

    def by_policy(self, micros: Sequence[MicroBatch]) -> list[torch.Tensor]:
        with torch.no_grad():
            return [self.policy(micro.batch)[0] for micro in micros]


class Cut:
    """Micro-batches of two sequences, and one that is empty, as a rank without a share of its own has it."""

    def of(self, sequences: Sequence[TrainSequence]) -> list[MicroBatch]:
        return [*micro_batches(sequences, 2), MicroBatch([], [], pack([]))]


def test_control_metrics_are_those_of_whole_distributions_however_the_batch_is_cut(policy, model_dir):
    sequences = played_sequences()
    expected = expected_control_metrics(in_double(policy, model_dir), sequences)
    for size in (1, 3, len(sequences)):
        empty = MicroBatch([], [], pack([]))
        assert watched(policy, [*micro_batches(sequences, size), empty]) == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_references_and_hinted_samples_are_not_watched(policy):
    sequences = played_sequences()
    own = watched(policy, micro_batches(sequences[:4], 4))
    for index in (1, 3):
        sequences.insert(index, replace(sequences[-1], is_own=False))
    assert watched(policy, micro_batches(sequences[:6], 3)) == pytest.approx(own, rel=1e-5, abs=1e-7)


def test_the_order_of_the_batch_changes_nothing(policy):
    sequences = played_sequences()
    forwards, backwards = (watched(policy, micro_batches(order, 4)) for order in (sequences, sequences[::-1]))
    assert backwards == pytest.approx(forwards, rel=1e-5, abs=1e-7)


def test_a_call_token_that_becomes_unlikely_shows_where_it_belongs(policy):
    micros = micro_batches(played_sequences(), 8)
    healthy = watched(policy, micros)
    shift = torch.zeros(policy.causal_lm.get_output_embeddings().weight.shape[0])
    shift[CONTROL.ids[CONTROL.opens_call]] = -4.0 * 0.8  # logits are divided by the temperature
    policy.causal_lm.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits + shift)
    sunk = watched(policy, micros)
    assert sunk["control/tool_call/logp_mean"] == pytest.approx(healthy["control/tool_call/logp_mean"] - 4, abs=0.05)
    assert sunk["control/tool_call/logp_max"] == pytest.approx(healthy["control/tool_call/logp_max"] - 4, abs=0.05)
    ratio = sunk["control/tool_call/mass_outside"] / healthy["control/tool_call/mass_outside"]
    assert ratio == pytest.approx(np.exp(-4), rel=0.05)
    for other in ("end_tool_call", "im_end", "im_start"):
        for quantity in ("mass_outside", "logp_mean_outside"):
            name = f"control/{other}/{quantity}"
            assert sunk[name] == pytest.approx(healthy[name], rel=0.05), name


def test_a_control_token_that_spikes_everywhere_shows_outside_its_slots(policy):
    micros = micro_batches(played_sequences(), 8)
    healthy = watched(policy, micros)
    spike = torch.zeros(policy.causal_lm.get_output_embeddings().weight.shape[0])
    spike[CONTROL.ids[CONTROL.closes_call]] = 6.0
    policy.causal_lm.get_output_embeddings().register_forward_hook(lambda module, inputs, logits: logits + spike)
    sick = watched(policy, micros)
    assert sick["control/mass_outside"] > 10 * healthy["control/mass_outside"]
    assert sick["control/end_tool_call/mass_outside"] > 0.3 > 10 * healthy["control/end_tool_call/mass_outside"]
    assert sick["entropy/decision"] < healthy["entropy/decision"]
    assert 0 <= sick["control/mass_outside"] <= 1


def test_an_update_by_hand_displaces_likelihoods_as_float64_says(policy, model_dir):
    sequences = [sequence for sequence in played_sequences() if sequence.is_correct]
    before = turn_likelihoods(in_double(policy, model_dir), sequences)
    sums = Sums()
    probe = LikelihoodProbe(sequences, Cut(), Weights(policy))
    with torch.no_grad():
        for parameter in policy.causal_lm.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=3e-3)
    probe.add(sums)
    after = turn_likelihoods(in_double(policy, model_dir), sequences)
    changes = np.asarray([new - old for (_, old), (_, new) in zip(before, after, strict=True)])
    turns = np.asarray([min(turn, 8) for turn, _ in before])
    found = likelihood_metrics(sums)
    assert found["displacement/mean"] == pytest.approx(changes.mean(), abs=2e-5)
    assert found["displacement/share_sinking"] == pytest.approx((changes < 0).mean())
    assert 0 < found["displacement/share_sinking"] < 1
    for turn in np.unique(turns):
        name = f"turn_{turn + 1}" if turn < 8 else "turn_9_on"
        assert found[f"displacement/{name}"] == pytest.approx(changes[turns == turn].mean(), abs=2e-5)
        likelihood = np.mean([old for (_, old), mine in zip(before, turns == turn, strict=True) if mine])
        assert found[f"likelihood/correct/{name}"] == pytest.approx(likelihood, abs=2e-5)


def test_a_policy_that_did_not_move_is_displaced_by_exactly_nothing(policy):
    sums = Sums()
    LikelihoodProbe(played_sequences()[:3], Cut(), Weights(policy)).add(sums)
    moved = {name: value for name, value in likelihood_metrics(sums).items() if name.startswith("displacement/")}
    assert set(moved.values()) == {0.0} and len(moved) > 2


def test_only_correct_sequences_are_chosen_evenly_over_the_batch():
    sequences = played_sequences() * 10
    for count in (0, 1, 4, 1000):
        chosen = chosen_sequences(sequences, count)
        assert len(chosen) == min(count, sum(sequence.is_correct for sequence in sequences))
        assert all(sequence.is_correct for sequence in chosen)
    assert [sequence.trajectory_id for sequence in chosen_sequences(sequences[:7], 4)] == ["t0", "t1", "t5", "t6"]
    assert [sequence.trajectory_id for sequence in chosen_sequences(sequences[:7], 2)] == ["t0", "t5"]


def test_a_sequence_is_correct_where_the_policy_itself_got_the_full_score():
    right, partly, wrong, reference, hinted = episodes()[:5]
    for trajectory, reward in ((right, 2.0), (partly, 1.0), (wrong, 0.0), (reference, 2.0), (hinted, 2.0)):
        trajectory.rewards["outcome"] = reward
    note_guide(reference, "reference")
    note_guide(hinted, "hint", prompts=[hinted.prompt_ids])
    members = [right, partly, wrong, reference, hinted]
    made = sequences_from(members, [[0.0] * len(each.policy_turns) for each in members], outcome_weight=2.0)
    assert [sequence.is_correct for sequence in made] == [True, False, False, False, False]
    assert [sequence.is_own for sequence in made] == [True, True, True, False, False]


def test_turns_are_counted_on_where_the_history_was_rewritten():
    trajectory = episodes()[1]
    first, shown, *rest = trajectory.turns
    trajectory.turns = [first, Turn("tool", [*trajectory.prompt_ids, *shown.token_ids], fresh_context=True), *rest]
    made = sequences_from([trajectory], [[0.0] * 3])
    assert [(sequence.first_turn, sequence.turn_ids.max()) for sequence in made] == [(0, 0), (1, 1)]
