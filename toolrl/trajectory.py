"""What one episode leaves behind: its tokens exactly as they were sampled or shown, and everything that was recorded about them.

Invariants:
- The trained sequence is `prompt_ids` followed by every turn's `token_ids`; nothing is ever decoded and encoded again. Where a
  tool turn begins a fresh context (templates that rewrite history), the model saw its tokens alone from there on: the
  trajectory is trained as its `segments`.
- A policy turn holds only sampled tokens (its end token included when it was sampled), each with the log-probability of the
  distribution it was sampled from (temperature included) and the weight version that produced it.
- A tool turn holds only tokens that the policy did not sample: the rest of the template after the policy's end token, the
  observations, the next generation prompt.
- Masks come from the turns, never from a search in the text.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal


class Outcome(enum.StrEnum):
    """How an episode ended. A closed set that advantages, metrics and refill all obey."""

    ANSWERED = "answered"
    NO_ANSWER = "no_answer"
    LENGTH = "length"  # token budget or context used up
    TOOL_LIMIT = "tool_limit"  # turns or calls used up
    FORMAT_ERROR = "format_error"
    REWARD_MISSING = "reward_missing"  # the task's fault: not trained
    INFRA_ERROR = "infra_error"  # an engine or a sandbox died: re-issued
    STALE = "stale"  # older than the bound: re-issued
    CANCELLED = "cancelled"

    @property
    def trained(self) -> bool:
        """Whether such a trajectory enters group statistics and the loss."""
        return self in _TRAINED

    @property
    def reissued(self) -> bool:
        """Whether its place in the group is to be filled again."""
        return self in (Outcome.INFRA_ERROR, Outcome.STALE, Outcome.CANCELLED)


_TRAINED = frozenset({Outcome.ANSWERED, Outcome.NO_ANSWER, Outcome.LENGTH, Outcome.TOOL_LIMIT, Outcome.FORMAT_ERROR})

# What a call came to. The interpreter's closed set, what can go wrong before it is reached, and `pending`: a receipt, whose
# result comes in a later tool turn under the same call's id, or never.
ToolStatus = Literal[
    "ok",
    "error",
    "timeout",
    "oom",
    "output_limit",
    "died",
    "protocol_violation",
    "infra_error",
    "invalid_call",
    "pending",
]
# The run was stopped and its variables are gone: how much it had printed by then says nothing about its state.
STOPPED: frozenset[ToolStatus] = frozenset({"timeout", "oom", "output_limit", "died", "protocol_violation"})
NOT_SAMPLED = -1  # the weight version of a policy token that no weights of this run sampled: a reference's
LimitName = Literal["turn_tokens", "response_tokens", "context_tokens", "prompt_tokens", "turns", "calls"]


@dataclass(slots=True)
class ToolCall:
    """A call that a parser found in a policy turn. `arguments` is what the tool receives."""

    id: str
    name: str
    arguments: dict[str, Any]


@dataclass(slots=True)
class CallError:
    """A piece of a policy turn that meant to be a call and is not one; told to the model as an observation.

    `kind` is machine-readable: `bad_json`, `not_an_object`, `missing_name`, `bad_arguments`, `unclosed`, `empty`, `unknown_tool`.
    """

    kind: str
    message: str


@dataclass(slots=True)
class ToolResult:
    """What came back from one call. `text` is what the model saw, already neutralised and truncated."""

    call_id: str
    name: str
    status: ToolStatus
    text: str
    truncated: bool = False
    wall_s: float = 0.0
    queue_s: float = 0.0
    cpu_s: float = 0.0  # as are the bytes, only of tools that run something and measure it
    output_bytes: int = 0  # printed, before anything was cut
    injected: bool = False  # a failure on purpose: the tool itself was not run


@dataclass(slots=True)
class Turn:
    """One policy turn (sampled) or tool turn (shown). Lists that do not apply to the kind are empty."""

    kind: Literal["policy", "tool"]
    token_ids: list[int]
    # Policy turns, one entry a token:
    logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    finish_reason: str = ""  # the engine's word: "stop", "length", "abort"
    text: str = ""  # decoded, special tokens included; for people, verifiers and parsers, never for training
    calls: list[ToolCall] = field(default_factory=list)
    call_errors: list[CallError] = field(default_factory=list)
    rewards: dict[str, float] = field(default_factory=dict)  # named turn rewards, already weighted
    # Tool turns:
    results: list[ToolResult] = field(default_factory=list)
    fresh_context: bool = False  # its tokens are a whole new prompt that replaces everything before them


@dataclass(slots=True)
class Trajectory:
    """One episode. See the module's invariants."""

    id: str
    group_id: str
    task_id: str
    sample_index: int
    prompt_ids: list[int]
    turns: list[Turn] = field(default_factory=list)
    outcome: Outcome | None = None  # None while the episode runs
    limit: LimitName | None = None  # which limit bound, for `length`, `tool_limit` and a prompt without room
    answer: str | None = None
    rewards: dict[str, float] = field(default_factory=dict)  # named trajectory rewards, already weighted
    temperature: float = 1.0
    timings: dict[str, float] = field(default_factory=dict)  # seconds by name
    metadata: dict[str, Any] = field(default_factory=dict)  # family, difficulty, worker, …

    @property
    def policy_turns(self) -> list[Turn]:
        return [turn for turn in self.turns if turn.kind == "policy"]

    def results_of_turns(self) -> list[list[ToolResult]]:
        """[n_policy_turns] the results of each policy turn's own calls, whenever they came; receipts left out."""
        found: list[list[ToolResult]] = []
        receipts: dict[str, int] = {}  # call id -> policy turn
        for turn in self.turns:
            if turn.kind == "policy":
                found.append([])
            elif found:
                last = len(found) - 1
                for result in turn.results:
                    if result.status == "pending":
                        receipts[result.call_id] = last
                    else:
                        found[receipts.pop(result.call_id, last)].append(result)
        return found

    @property
    def outcome_reward(self) -> float:
        """Sum of the trajectory's own rewards."""
        return sum(self.rewards.values())

    @property
    def turn_rewards(self) -> list[float]:
        """[n_policy_turns] the sum of each policy turn's rewards."""
        return [sum(turn.rewards.values()) for turn in self.policy_turns]

    @property
    def reward(self) -> float:
        """Everything this trajectory earned."""
        return self.outcome_reward + sum(self.turn_rewards)

    @property
    def response_ids(self) -> list[int]:
        """Every token after the prompt."""
        return [token for turn in self.turns for token in turn.token_ids]

    @property
    def token_ids(self) -> list[int]:
        """Prompt and response: the sequence as the model saw it."""
        return self.prompt_ids + self.response_ids

    @property
    def context_ids(self) -> list[int]:
        """What the model sees when it samples the next token."""
        return self.segments()[-1].token_ids

    def segments(self) -> list[Trajectory]:
        """The pieces that share a context, each as a trajectory with its own prompt; [self] unless history was rewritten."""
        starts = [index for index, turn in enumerate(self.turns) if turn.fresh_context]
        if not starts:
            return [self]
        pieces = [replace(self, turns=self.turns[: starts[0]])]
        for start, end in zip(starts, [*starts[1:], len(self.turns)], strict=True):
            pieces.append(replace(self, prompt_ids=self.turns[start].token_ids, turns=self.turns[start + 1 : end]))
        return pieces

    def policy_mask(self) -> list[bool]:
        """[response length] True for the tokens that the policy sampled."""
        return [turn.kind == "policy" for turn in self.turns for _ in turn.token_ids]

    def turn_ids(self) -> list[int]:
        """[response length] index of the policy turn a token belongs to, -1 for tool tokens."""
        ids: list[int] = []
        index = -1
        for turn in self.turns:
            if turn.kind == "policy":
                index += 1
                ids.extend([index] * len(turn.token_ids))
            else:
                ids.extend([-1] * len(turn.token_ids))
        return ids

    def rollout_logprobs(self) -> list[float]:
        """[response length] log-probabilities of the sampling distribution, 0.0 for tool tokens."""
        return [
            value
            for turn in self.turns
            for value in (turn.logprobs if turn.kind == "policy" else [0.0] * len(turn.token_ids))
        ]

    @property
    def oldest_version(self) -> int | None:
        """The oldest weight version that sampled any of its tokens; None before the first token, and for a reference."""
        return min(self.versions, default=None)

    @property
    def versions(self) -> set[int]:
        """The weight versions that sampled its tokens."""
        return {v for turn in self.policy_turns for v in turn.weight_versions if v != NOT_SAMPLED}

    def check(self) -> None:
        """Raises ValueError when the recorded turns contradict themselves: what must never reach a learner."""
        for index, turn in enumerate(self.turns):
            where = f"trajectory {self.id}, turn {index}"
            if turn.kind == "policy":
                lengths = (len(turn.token_ids), len(turn.logprobs), len(turn.weight_versions))
                if len(set(lengths)) != 1:
                    raise ValueError(f"{where}: token_ids, logprobs and weight_versions differ in length: {lengths}")
                if turn.fresh_context:
                    raise ValueError(f"{where}: only a tool turn can begin a fresh context")
            elif turn.logprobs or turn.weight_versions or turn.calls:
                raise ValueError(f"{where}: a tool turn holds log-probabilities, versions or calls")
        if self.outcome is not None and self.outcome.trained and not self.policy_turns:
            raise ValueError(f"trajectory {self.id}: outcome {self.outcome} without a policy turn")


def staleness(trajectory: Trajectory, learner_version: int) -> int:
    """Versions between the learner and the oldest weights that sampled any of the trajectory's tokens."""
    oldest = trajectory.oldest_version
    return 0 if oldest is None else max(0, learner_version - oldest)


def groups_of(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Trajectories by group id, each group in sample order."""
    groups: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        groups.setdefault(trajectory.group_id, []).append(trajectory)
    for members in groups.values():
        members.sort(key=lambda t: t.sample_index)
    return groups
