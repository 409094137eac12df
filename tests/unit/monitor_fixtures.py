"""Trajectories as the tiny tokenizer writes them, healthy and sick turns among them, and what they come to in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from learner.sequence import TrainSequence, sequences_from
from tests.unit.chat_templates import TOOLS
from toolrl import toolcalls
from toolrl.app.tiny_tokenizer import build_tokenizer
from toolrl.conversation import ChatFormat
from toolrl.monitors.control_tokens import ControlTokens
from toolrl.monitors.legal_slots import sequence_slots
from toolrl.trajectory import Outcome, Trajectory, Turn

TOKENIZER = build_tokenizer()
HERMES = toolcalls.get("hermes")
CONTROL = ControlTokens.of(TOKENIZER, ChatFormat(TOKENIZER, tools=TOOLS, parser=HERMES), HERMES)
CALL = '<tool_call>\n{"name": "python", "arguments": {"code": "print(12 + 30)"}}\n</tool_call><|im_end|>'
OBSERVATION = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
# Turns of each trajectory, and whether it is right.
EPISODES: list[tuple[list[str], bool]] = [
    ([CALL, "It is \\boxed{42}<|im_end|>"], True),
    ([CALL, CALL, "\\boxed{42}<|im_end|>"], True),
    (["\\boxed{41}<|im_end|>"], False),
    (["<tool_call></tool_call><|im_end|>"], False),
    (["<think>\nhm\n</think>\n", "so <tool_call> 4<|im_end|>"], False),
    ([*[CALL] * 9, "\\boxed{42}<|im_end|>"], True),
    (["\\boxed{42}<|im_end|>"], True),
]


def ids(text: str) -> list[int]:
    found: list[int] = TOKENIZER.encode(text, add_special_tokens=False)
    return found


def episodes(temperature: float = 0.8) -> list[Trajectory]:
    """One trajectory each of `EPISODES`, in groups of two."""
    made = []
    for index, (texts, right) in enumerate(EPISODES):
        turns: list[Turn] = []
        for text in texts:
            turns += [Turn("tool", ids(OBSERVATION))] if turns else []
            tokens = ids(text)
            turns.append(Turn("policy", tokens, [-1.0] * len(tokens), [0] * len(tokens), "stop", text))
        prompt = ids(f"<|im_start|>user\n12 + {30 + index // 2} =<|im_end|>\n<|im_start|>assistant\n")
        made.append(
            Trajectory(
                f"t{index}",
                f"g{index // 2}",
                f"task{index // 2}",
                index % 2,
                prompt,
                turns,
                outcome=Outcome.ANSWERED,
                rewards={"outcome": float(right)},
                temperature=temperature,
            )
        )
    return made


def played_sequences(temperature: float = 0.8) -> list[TrainSequence]:
    """What a learner gets of `episodes`; right ones have a positive advantage."""
    trajectories = episodes(temperature)
    advantages = [[1.0 if t.rewards["outcome"] else -1.0] * len(t.policy_turns) for t in trajectories]
    return sequences_from(trajectories, advantages)


def distributions(model: Any, sequence: TrainSequence) -> np.ndarray:
    """[P, V] float64 log-probabilities that a sequence's policy tokens were drawn from: one row, whole logits."""
    tokens = torch.from_numpy(sequence.token_ids)[None]
    with torch.no_grad():
        logits = model(input_ids=tokens, use_cache=False).logits[0, sequence.prompt_length - 1 : -1]
    logs: np.ndarray = (logits.double() / sequence.temperature).log_softmax(-1).numpy()[sequence.policy_mask]
    return logs


def expected_control_metrics(model: Any, sequences: Sequence[TrainSequence]) -> dict[str, float]:
    """The control monitor by its definition, from whole distributions."""
    logs, legal, decisions = [], [], []
    for each in sequences:
        slots = sequence_slots(CONTROL, each.token_ids, each.prompt_length, each.policy_mask, each.turn_ids)
        logs.append(distributions(model, each))
        legal.append(slots.legal)
        decisions.append(slots.decisions)
    every, allowed, deciding = np.concatenate(logs), np.concatenate(legal), np.concatenate(decisions)
    watched = every[:, CONTROL.ids]
    entropy = -(np.exp(every) * every).sum(1)
    found = {
        "control/mass_outside": float((np.exp(watched) * ~allowed).sum(1).mean()),
        "entropy/decision": float(entropy[deciding].mean()),
    }
    for index, name in enumerate(CONTROL.names):
        inside, outside = watched[allowed[:, index], index], watched[~allowed[:, index], index]
        for values, ending in ((inside, ""), (outside, "_outside")):
            if len(values):
                found[f"control/{name}/logp_mean{ending}"] = float(values.mean())
                found[f"control/{name}/logp_max{ending}"] = float(values.max())
        if len(outside):
            found[f"control/{name}/mass_outside"] = float(np.exp(outside).mean())
    return found


def turn_likelihoods(model: Any, sequences: Sequence[TrainSequence]) -> list[tuple[int, float]]:
    """(turn, mean log-probability a token) of every turn of the sequences."""
    found = []
    for each in sequences:
        logs, turns = distributions(model, each), each.turn_ids[each.policy_mask]
        chosen = logs[np.arange(len(logs)), each.token_ids[each.prompt_length :][each.policy_mask]]
        found += [(int(turn), float(chosen[turns == turn].mean())) for turn in np.unique(turns)]
    return found
