"""Every metric of a step by name, with a sentence: the one list that guards, `toolrl monitor` and the docs read. No torch.

A word in capitals stands for one part of the name: `solve_rate/family/NAME` knows `solve_rate/family/gcd`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from toolrl.registry import nearest

# Who measures it: `trajectories`: read off the batch, afterwards too where it is stored; `learner`: needs the model;
# `account`: the ledger of samples; `loop`: the driver, its workers and queues; `guards`.
Source = Literal["trajectories", "learner", "account", "loop", "guards"]


@dataclass(frozen=True)
class KnownMetric:
    """A metric, or a pattern of them."""

    pattern: str
    source: Source
    meaning: str

    def fits(self, name: str) -> bool:
        return _expression(self.pattern).fullmatch(name) is not None


def known(name: str) -> KnownMetric | None:
    """The entry that a metric's name belongs to; None for a name that nothing measures."""
    return next((entry for entry in KNOWN_METRICS if entry.fits(name)), None)


def suggestion(name: str) -> str:
    """`; did you mean 'x'?`, or every pattern there is: the end of a message about an unknown name."""
    return nearest(name, [entry.pattern for entry in KNOWN_METRICS])


def tells_of_collapse(name: str) -> bool:
    """Whether a metric, or a pattern of them, shows one of the ways in which tool-use training dies."""
    return any(fnmatchcase(name, pattern) for pattern in COLLAPSE)


def markdown(entries: Iterable[KnownMetric]) -> str:
    """The docs' table of these entries."""
    rows = [f"| `{entry.pattern}` | {entry.source} | {entry.meaning} |" for entry in entries]
    return "\n".join(["| name | from | what |", "|---|---|---|", *rows]) + "\n"


# In the order in which they are shown.
COLLAPSE = (
    "tool/call_rate*",
    "tool/calls_per_trajectory*",
    "solve_rate*",
    "reward/mean",
    "reward/std*",
    "reward/gap_calls",
    "reward/share/*",
    "interaction/*",
    "signal/*",
    "format/*",
    "control/*mass_outside",
    "control/*/logp_*",
    "entropy/*",
    "likelihood/*",
    "displacement/*",
    "ess",
    "ratio/*",
    "gap/*",
    "staleness/*",
)


@functools.cache
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(re.sub(r"[A-Z]+", r"[^/]+", re.escape(pattern)))


_TRAJECTORIES = {
    "reward/mean": "mean reward of the trained trajectories",
    "reward/std": "its standard deviation over them",
    "reward/std/with_calls": "the same over trajectories with a call",
    "reward/std/without_calls": "the same over trajectories without one",
    "reward/gap_calls": "mean reward with calls − mean reward without; absent where one kind is missing",
    "reward/awaited": "share of trained trajectories with late rewards that had not come; they are in no other mean of rewards",
    "reward/component/NAME": "mean of one weighted component, its turns' rewards added up",
    "reward/share/NAME": "share of the component in the sum of all components' absolute values, weight × score",
    "solve_rate": "share of trained trajectories whose answer got the verifier's full score",
    "solve_rate/with_calls": "the same over trajectories with a call",
    "solve_rate/without_calls": "the same over trajectories without one",
    "solve_rate/family/NAME": "the same over one task family",
    "solve_rate/with_calls/family/NAME": "the same over one family's trajectories with a call",
    "solve_rate/without_calls/family/NAME": "the same over one family's trajectories without one",
    "interaction/evidence": "solve rate with calls − without on the same task, mean over tasks that were tried both ways",
    "interaction/tasks_both_ways": "share of the batch's tasks that were tried both ways",
    "signal/groups_without": "share of groups whose rewards had no spread, those included that the buffer had dropped for it",
    "tool/call_rate": "share of trained trajectories with a call",
    "tool/call_rate/family/NAME": "the same over one task family",
    "tool/call_rate/difficulty/NAME": "the same over `easy`, `medium` or `hard` tasks: over ⅔, between, or under ⅓ of the "
    "batch's own attempts at the task solved it",
    "tool/calls_per_trajectory": "calls that were read, over trained trajectories",
    "tool/calls_per_trajectory/family/NAME": "the same over one task family",
    "tool/calls_per_trajectory/difficulty/NAME": "the same by difficulty",
    "tool/status/STATUS": "share of results with this status; receipts count as nothing",
    "tool/wall_s_mean": "a result's seconds",
    "tool/queue_s_mean": "of those, waiting for a box",
    "tool/cpu_s_mean": "processor seconds of a run",
    "tool/output_bytes_mean": "bytes that a run printed",
    "tool/results_after_deadline": "results that came too late and were thrown away",
    "tool/calls_without_result": "calls whose result never came",
    "turns/mean": "policy turns of a trajectory",
    "turns/void": "share of policy turns without a complete call or a final answer",
    "format/healthy": "share of policy turns that are a healthy call or a healthy answer",
    "format/healthy_call": "share of policy turns with well-formed calls",
    "format/healthy_answer": "share of policy turns that are plain text",
    "format/polluted": "share of policy turns with a broken call, a stray tag or a control token in mid-text",
    "format/collapsed": "share of policy turns with an empty or unclosed call, or nothing but control tokens",
    "outcome/NAME": "share of the batch's trajectories that ended so",
    "limit/NAME": "share of the batch's trajectories that this limit ended",
    "length/policy_mean": "sampled tokens of a trajectory",
    "length/policy_max": "the most sampled tokens",
    "length/total_mean": "all tokens of a trajectory, prompt included",
    "length/truncation_rate": "share that a token budget cut off",
    "staleness/mean": "versions between the learner and a trajectory's oldest token",
    "staleness/max": "the largest of them",
    "continued/share": "share of trained trajectories that were taken up at a turn boundary",
    "continued/replay_changed": "share of those trained where a replayed call gave something else",
}

_LEARNER = {
    "control/mass_outside": "probability of all control tokens where they may not stand, mean over policy tokens",
    "control/TOKEN/mass_outside": "probability of one control token outside its legal slots, mean over those places",
    "control/TOKEN/logp_mean": "its mean log-probability in its legal slots",
    "control/TOKEN/logp_max": "its largest log-probability in its legal slots",
    "control/TOKEN/logp_mean_outside": "its mean log-probability outside them",
    "control/TOKEN/logp_max_outside": "its largest log-probability outside them",
    "entropy/decision": "entropy in nats where the policy decides between call, answer and end, before the first update",
    "entropy/mean": "entropy in nats over all policy tokens, while learning",
    "likelihood/correct/turn_K": "log-probability a token of turn K of correct trajectories before the updates; K counts from 1",
    "displacement/mean": "what the step's updates added to it, mean over turns; negative: own good actions became less likely",
    "displacement/turn_K": "the same for turn K",
    "displacement/share_sinking": "share of turns of correct trajectories that became less likely",
    "gap/mean": "how far apart trainer and engine are in the log-probability of a policy token, before the first update",
    "gap/max": "the largest of them",
    "ess": "effective sample size of the importance ratios, as a share of tokens",
    "ratio/max": "largest importance ratio",
    "ratio/clip_fraction": "share of tokens whose ratio is clipped",
    "ratio/clip_fraction_QUARTER": "the same in `q1` to `q4`, the quarters of each trajectory's policy tokens",
    "ratio/clip/by_position/RANGE": "the same by the policy token's number over all turns: `1_16`, `17_64`, `65_256`, "
    "`257_1024`, `1025_on`; absent where there is no token",
    "ratio/mean/by_position/RANGE": "mean importance ratio by the same ranges",
    "logp/mean": "log-probability of policy tokens while learning",
    "kl/mean": "KL to the reference model",
    "loss/NAME": "the policy's loss, a regulariser before its weight, or the supervised loss; mean over the batch's updates",
    "grad/norm": "gradient norm before clipping, mean over the batch's updates",
    "grad/norm_max": "the largest of them",
    "critic/NAME": "the critic: loss, clipped turns, explained variance, gradient norm, skipped steps",
    "lr": "learning rate",
    "optimizer_steps": "applied since the run began, supervised ones apart",
    "skipped_steps": "optimiser steps of this batch that were left out because loss or gradient was not finite",
    "skipped_steps/total": "the same since the process began",
    "empty_updates": "updates without a token in the loss",
    "alarm/nonfinite": "1 where a step was skipped",
    "tokens/policy": "sampled tokens of the batch",
    "tokens/total": "all tokens of the batch",
}

_ACCOUNT = {
    "ended/OUTCOME": "trajectories that ended so since the last step, whatever became of them",
    "samples/trained": "samples trained since the last step",
    "samples/dropped": "samples given up since the last step",
    "samples/dropped/REASON": "the same by reason",
    "samples/reissued": "samples to be tried again, since the last step",
    "samples/reissued/REASON": "the same by reason",
    "samples/late_rewards/STATUS": "what became of delivered rewards since the last step",
}

_LOOP = {
    "supervision/seats/GUIDE": "share of the batch's trajectories that are references, or sampled after a hint",
    "supervision/reward/GUIDE": "their mean reward",
    "supervision/references": "tasks with a reference",
    "supervision/references/own": "those of them with a right trajectory of this run",
    "supervision/SIGNAL/steps": "supervised steps after this step: for failed tasks (erroneous), by schedule (interleaved), on "
    "corrections (reflection)",
    "supervision/SIGNAL/references": "references, or corrections, shown in them",
    "supervision/SIGNAL/loss": "their mean loss; absent where no step was taken",
    "supervision/erroneous/failed_tasks": "tasks of the batch whose samples all failed",
    "supervision/reflection/asked": "failed trajectories that the critic was asked about since the last step",
    "supervision/reflection/not_asked": "those that it was not, because the queue was full",
    "supervision/reflection/answered": "answers that came",
    "supervision/reflection/retries": "requests that were sent again",
    "supervision/reflection/verified": "corrections that held when they were run and checked",
    "supervision/reflection/failed": "questions that gave no correction",
    "supervision/reflection/failed/REASON": "the same by reason",
    "supervision/reflection/late": "corrections learnt at a later step than the one that asked",
    "supervision/reflection/waiting": "trajectories at the critic, and corrections not learnt yet",
    "step": "batches trained",
    "version": "of the weights after the step",
    "time_s": "seconds since the run began",
    "time/rollout_s": "waiting for the batch",
    "time/learn_s": "learning",
    "time/learn_processor_s": "processor seconds of the learner's first rank for it",
    "time/publish_s": "publishing the weights",
    "time/sleep_s": "colocated: from the batch until engines sleep and the learner has its memory",
    "time/wake_s": "colocated: from the learner's last work until engines generate, without the publication; absent where "
    "nothing slept before the step",
    "speed/policy_tokens_per_s": "sampled tokens of the batch over the step's seconds",
    "buffer/NAME": "queue depths and sizes of the replay buffer",
    "weights/bytes": "published after the step, once for all engines",
    "weights/share_of_merged": "those bytes to the bytes of all weights: below 1 where an adapter is published",
    "weights/update_s": "of the last publication: from its begin until every engine that took it had it, or was given up",
    "weights/connect_s": "of that, forming a group of learner and engines; 0 where the old one held, or there is none",
    "weights/gather_s": "of that, the learner's ranks making whole tensors",
    "weights/send_s": "of that, writing them into memory, or sending them over the group until the engines had them",
    "weights/fetch_s": "the slowest engine's, reading them from another host's memory",
    "weights/prepare_s": "the slowest engine's, making the next weights ready while it generates; 0 where it cannot",
    "weights/pause_s": "the slowest engine's, in which it generated nothing",
    "weights/apply_s": "of that, exchanging or loading weights",
    "weights/over_group": "engines that got it over a group with the learner; the others got it through memory",
    "worker/NAME": "rollout workers: how many, running and parked episodes, event-loop lag, behind in weights, asleep",
    "reward_worker/NAME": "of the reward `prm`: workers that are up (count), and how often one was replaced",
    "monte_carlo/NAME": "since the rollout workers began: continuations played, their tokens, those without a score",
    "weights/NAME": "the last publication of weights: bytes, their share of the whole model's, and what it took",
    "sandbox/NAME": "boxes and runs of code since the workers began",
    "sandbox/status/STATUS": "share of runs that ended so",
    "sandbox/suspicions/KIND": "runs that wrote to the interpreter's pipe or ended in a refusal",
}

_GUARDS = {
    "guard/RULE": "1 at the step at which the rule fired",
    "guards/blind": "rules whose metric had no value at this step",
    "guards/NAME": "the guards' own counts: batches that were rejected",
    "controls/lr_factor": "what guards multiply the learning rate with",
    "controls/kl_weight": "extra weight of the KL to the policy after the cold start",
    "controls/llds_weight": "extra weight of LLDS",
    "controls/reward_weight/NAME": "a reward's weight where guards changed it",
}

_BY_SOURCE: tuple[tuple[Source, dict[str, str]], ...] = (
    ("trajectories", _TRAJECTORIES),
    ("learner", _LEARNER),
    ("account", _ACCOUNT),
    ("loop", _LOOP),
    ("guards", _GUARDS),
)
KNOWN_METRICS: tuple[KnownMetric, ...] = tuple(
    KnownMetric(pattern, source, meaning) for source, part in _BY_SOURCE for pattern, meaning in part.items()
)
