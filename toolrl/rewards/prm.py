"""`prm`: a process reward model says how good an episode stands after each turn.

Reward workers do that (`actors.reward_worker`) while rollouts go on, and deliver the credit of the turns as a late reward. The
model is a classifier in Hugging Face format (`toolrl.rewards.step_classifier`), or whatever a function of the user's own
returns (`StepScorer`). What a turn earns is what the score gained or lost there (`toolrl.rewards.step_scores`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from toolrl.registry import Registry
from toolrl.rewards.budget import is_measured
from toolrl.rewards.component import Pending, RewardContext, rewards
from toolrl.rewards.step_scores import Aggregate, Per
from toolrl.tasks import Task
from toolrl.trajectory import Trajectory

NAME = "prm"


class StepScorer(Protocol):
    """A process reward model. It is called in a thread of its reward worker, one call at a time."""

    def score(self, trajectories: Sequence[Trajectory]) -> list[list[float | None]]:
        """For each trajectory [1 + n_policy_turns] scores, 0 to 1: how good it stands at the end of its prompt and of each of
        its policy turns. None: not known."""
        ...


@dataclass(frozen=True)
class PrmOptions:
    """See `prm`."""

    model: str
    share: float
    batch_size: int
    device: Literal["cpu", "cuda"]
    dtype: Literal["float32", "bfloat16"]
    workers: int
    cpu_threads: int
    gpus: float
    label: int
    step_token: str | None
    aggregate: Aggregate
    per: Per


@rewards.register("prm")
def prm(
    trajectory: Trajectory,
    task: Task,
    context: RewardContext,
    *,
    model: str,
    share: float = 1.0,
    batch_size: int = 8,
    device: Literal["cpu", "cuda"] = "cpu",
    dtype: Literal["float32", "bfloat16"] = "float32",
    workers: int = 1,
    cpu_threads: int = 1,
    gpus: float = 1.0,
    label: int = -1,
    step_token: str | None = None,
    aggregate: Aggregate = "last",
    per: Per = "turn",
) -> float | Pending:
    """Comes late; 0 in groups that are not measured.

    Args:
        model: a folder in Hugging Face format with a sequence or token classifier, or the import path of a function
            `(PrmOptions, model folder of the policy) -> StepScorer`.
        share: of the groups; in a measured group every trajectory is.
        batch_size: rows that the classifier reads at once.
        workers, cpu_threads, gpus: reward workers, and what each takes: threads, and GPUs with device cuda.
        label: index of the label whose probability is the score; a model with a single label gives its sigmoid.
        step_token: text of a token that is put after the prompt and each turn, for models that were trained to score there.
        aggregate, per: see `toolrl.rewards.step_scores`.
    """
    return Pending() if is_measured(trajectory.group_id, share, NAME) else 0.0


def step_scorer(options: PrmOptions, policy_dir: str) -> StepScorer:
    """Loads the model.

    Raises:
        UserError: there is no such folder or function, or it holds no classifier; says what to change.
    """
    if ":" in options.model:
        scorers: Registry[Callable[[PrmOptions, str], StepScorer]] = Registry("process reward model")
        return scorers.get(options.model)(options, policy_dir)
    from toolrl.rewards.step_classifier import StepClassifier

    return StepClassifier(options, policy_dir)
