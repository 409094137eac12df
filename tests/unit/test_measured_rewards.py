"""Was a result used? Real episodes, chat format and learner's reader around a model made by hand, which copies digits from
wherever they stand in its context and looks at nothing else."""

from __future__ import annotations

import functools
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from learner.activity import Activity
from learner.attention import NAME
from learner.attention_mass import Spans
from learner.evidence import Reader
from learner.micro_batches import MicroBatches
from learner.policy import PolicyModel
from learner.sequence import TrainSequence
from learner.ulysses import RankGroups
from tests.episodes import END, call, play, tiny
from toolrl.answers import answer_tokens
from toolrl.app.measured_rewards import MeasuredRewards
from toolrl.app.tiny_tokenizer import VOCABULARY_SIZE
from toolrl.config import LearnerConfig, ToolConfig
from toolrl.conversation import ChatFormat
from toolrl.conversation.result_spans import result_spans
from toolrl.rewards.attention_mass import attention_mass
from toolrl.rewards.masked_result import masked_result
from toolrl.tasks import Task
from toolrl.toolcalls.hermes import Hermes
from toolrl.tools import function_schema
from toolrl.trajectory import ToolResult, Trajectory

SAYS = f"{__name__}:Says"
TASK = Task("t0", "words", [{"role": "user", "content": "How many?"}], "42", "math")
SAID = {"count": "there are 42", "again": "it is 42", "weather": "it is fine", "nothing": ""}


class Says:
    """A tool that says what its argument names."""

    name = "says"
    schema = function_schema("says", "Says.", {"expression": "what"})
    keeps_no_state = True

    def __init__(self, config: ToolConfig, interpreter: Any) -> None:
        self.timeout_s = 5.0

    @asynccontextmanager
    async def session(self, episode_id: str) -> Any:
        yield self

    async def call(self, asked: Any) -> ToolResult:
        return ToolResult(asked.id, asked.name, "ok", SAID[asked.arguments["expression"]])


async def episode(*asked: str, answer: str = "42") -> Trajectory:
    """One call a turn, then the answer."""
    said = [*(call(each, "says") for each in asked), f"\\boxed{{{answer}}}{END}"]
    trajectory = await play(*said, task=TASK, tool_names=[SAYS], chat=chat(), components=["format"])
    trajectory.rewards["outcome"] = float(answer == TASK.ground_truth)
    return trajectory


def copying_model() -> torch.nn.Module:
    """One layer, one head. The states' first half is the token's one-hot vector, the second what was copied. All queries are
    alike, and the keys of digits fit them; what is attended to is copied, and the head reads it.

    The frequency of the keys' dimension is so low that positions do not matter.
    """
    v = VOCABULARY_SIZE
    config = LlamaConfig(
        vocab_size=v,
        hidden_size=2 * v,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=v,
        rope_parameters={"rope_type": "default", "rope_theta": 1e12},
        tie_word_embeddings=False,
        max_position_embeddings=4096,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32).eval()
    layer, still = model.model.layers[0], v // 2 - 1  # of the pair (still, still + v/2) the rotation is the slowest
    with torch.no_grad():
        for parameter in (*layer.self_attn.parameters(), *layer.mlp.parameters()):
            parameter.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(v, 2 * v))
        layer.self_attn.q_proj.weight[still, :v] = 1.0
        digits = tiny().convert_tokens_to_ids(list("0123456789"))
        layer.self_attn.k_proj.weight[still, digits] = 0.5
        layer.self_attn.v_proj.weight[:, :v] = torch.eye(v)
        layer.self_attn.o_proj.weight[v:, :] = torch.eye(v)
        model.lm_head.weight[:, v:] = 0.3 * torch.eye(v)
    return model


class Learner:
    """One rank's reader, without DeepSpeed and Ray."""

    def __init__(self, model: torch.nn.Module) -> None:
        policy = PolicyModel(model, chunk=4096)
        models: Any = SimpleNamespace(engine=policy, policy=policy, critic=None, reference=None)
        batches = MicroBatches(LearnerConfig(), RankGroups(0, 1), torch.device("cpu"))
        self.reader = Reader(models, batches, Activity(0))
        self.asked: list[list[TrainSequence]] = []

    async def logprobs(self, sequences: list[TrainSequence]) -> list[np.ndarray]:
        self.asked.append(sequences)
        found = self.reader.logprobs(sequences)
        return [found[index] for index in range(len(sequences))]

    async def attention_mass(
        self, sequences: list[TrainSequence], spans: list[list[Spans]], layer: int
    ) -> list[np.ndarray]:
        self.asked.append(sequences)
        found = self.reader.attention_mass(sequences, spans, layer)
        return [found[index] for index in range(len(sequences))]


@pytest.fixture(scope="module")
def learner() -> Learner:
    return Learner(copying_model())


@functools.cache
def chat() -> ChatFormat:
    return ChatFormat(tiny(), tools=[Says.schema], parser=Hermes())


def measured(name: str, weight: float = 1.0, **options: Any) -> MeasuredRewards:
    defaults = {"masked_result": {"full_nats": 3.0}, "attention_mass": {"layer": -1}}[name]
    chosen = {name: {"share": 1.0, "outcome_reward": "outcome", **defaults, **options}}
    return MeasuredRewards(chat(), lambda ids: tiny().decode(ids), "boxed", chosen, {name: weight})


def earned(trajectory: Trajectory, name: str) -> list[float]:
    return [turn.rewards[name] for turn in trajectory.policy_turns]


async def test_the_spans_of_results_are_their_text_and_nothing_of_the_template() -> None:
    trajectory = await episode("count", "nothing", "weather")
    spans = result_spans(chat(), trajectory)
    response = trajectory.response_ids
    texts = [[tiny().decode(response[start:end]) for start, end in each] for each in spans]
    assert texts == [["there are 42"], [], ["it is fine"], []]
    two = call("weather", "says").removesuffix(END) + "\n" + call("count", "says")
    trajectory = await play(two, f"\\boxed{{42}}{END}", task=TASK, tool_names=[SAYS], chat=chat())
    ((first, second), _) = result_spans(chat(), trajectory)
    assert [tiny().decode(trajectory.response_ids[slice(*each)]) for each in (first, second)] == [
        "it is fine",
        "there are 42",
    ]


async def test_the_answers_tokens_are_found_in_the_last_turn() -> None:
    turn = await episode("count", answer="42 or 7")
    last = turn.policy_turns[-1]
    span = answer_tokens(last, "boxed", lambda ids: tiny().decode(ids))
    assert span is not None and tiny().decode(last.token_ids[slice(*span)]) == "42 or 7"
    assert answer_tokens(turn.policy_turns[0], "boxed", lambda ids: tiny().decode(ids)) is None


async def test_a_result_that_is_copied_earns_and_one_that_is_ignored_does_not(learner: Learner) -> None:
    copied, other = await episode("weather", "count"), await episode("weather")
    await measured("masked_result", weight=0.5).score(learner, [copied, other])
    assert earned(copied, "masked_result") == pytest.approx([0.0, 0.5, 0.0], abs=1e-3)
    assert earned(other, "masked_result") == pytest.approx([0.0, 0.0], abs=0.01), "it guessed"
    await measured("attention_mass").score(learner, [copied])
    ignored, used, last = earned(copied, "attention_mass")
    assert used > 0.5 and ignored < 1e-3 and last == 0.0
    # What is asked of the learner is the answer's tokens alone.
    whole = learner.asked[0][0]
    assert [int(each.policy_mask.sum()) for each in learner.asked[0]] == [2] * 5 and whole.hidden is None


async def test_drops_are_those_of_the_model_itself_with_a_mask(learner: Learner) -> None:
    trajectory = await episode("weather", "count")
    rewards = measured("masked_result")
    spans = result_spans(rewards.chat, trajectory)
    ((_, drop, _),) = await rewards._drops(learner, [trajectory], [spans])
    prompt = len(trajectory.prompt_ids)
    ids = torch.tensor([trajectory.token_ids])
    last = trajectory.policy_turns[-1]
    start, end = answer_tokens(last, "boxed", rewards.decode) or (0, 0)
    at = torch.arange(len(ids[0]) - len(last.token_ids) + start, len(ids[0]) - len(last.token_ids) + end)
    found = []
    model = learner.reader._models.policy.causal_lm
    model.set_attn_implementation("eager")
    for hidden in ([], spans[1]):
        mask = torch.ones_like(ids)
        for first, behind in hidden:
            mask[0, prompt + first : prompt + behind] = 0
        with torch.no_grad():
            logits = model(ids, attention_mask=mask, position_ids=torch.arange(len(ids[0]))[None]).logits[0]
        found.append(float(logits.log_softmax(-1)[at - 1, ids[0, at]].double().sum()))
    model.set_attn_implementation(NAME)
    assert drop == pytest.approx(found[0] - found[1], abs=1e-4) and found[0] - found[1] > 3


async def test_calls_that_repeat_a_result_share_nothing_out(learner: Learner) -> None:
    """Hiding either leaves the other in sight: repeating a call collects nothing."""
    once, twice = await episode("count"), await episode("count", "again")
    await measured("masked_result", full_nats=30.0).score(learner, [once, twice])
    assert sum(earned(twice, "masked_result")) < 0.4 * sum(earned(once, "masked_result"))


async def test_a_wrong_answer_and_a_group_that_is_not_drawn_earn_nothing(learner: Learner) -> None:
    wrong = await episode("count", answer="24")
    for name in ("masked_result", "attention_mass"):
        await measured(name).score(learner, [wrong])
        assert earned(wrong, name) == [0.0, 0.0]
        right = await episode("count")
        before = len(learner.asked)
        await measured(name, share=1e-9).score(learner, [right])
        assert earned(right, name) == [0.0, 0.0] and len(learner.asked) == before
    await measured("attention_mass", outcome_reward=None).score(learner, [wrong])
    assert earned(wrong, "attention_mass")[0] > 0.5


async def test_weights_in_force_come_before_the_configs(learner: Learner) -> None:
    trajectory = await episode("count")
    await measured("masked_result").score(learner, [trajectory], {"masked_result": 0.25})
    assert earned(trajectory, "masked_result") == pytest.approx([0.25, 0.0], abs=1e-3)


def test_scores_are_bounded_and_length_earns_nothing() -> None:
    right = Trajectory("t", "g000000", "t", 0, [1], rewards={"outcome": 0.5})
    assert masked_result(right, [None, -2.0, 1.5, 99.0]) == [0.0, 0.0, 0.5, 1.0]
    assert attention_mass(right, [None, (0.3, 0.3), (0.2, 0.5), (0.75, 0.5), (1.0, 1.0)]) == [0.0, 0.0, 0.0, 0.5, 0.0]
