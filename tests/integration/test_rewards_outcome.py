"""The outcome reward with real verifiers: what an answer earns, and what a verifier's failure costs."""

import pytest

from toolrl.config import Named, RewardConfig, TaskConfig
from toolrl.rewards import RewardPipeline
from toolrl.tasks import AnswerChecker, Task
from toolrl.trajectory import Outcome, Trajectory, Turn

OWN = "tests.integration.own_verifiers:"


def episode(answer):
    return Trajectory("t0", "g0", "t1", 0, [1], [Turn("policy", [2], [-0.1], [0])], Outcome.ANSWERED, answer=answer)


async def score(verifier, answer, **options):
    async with AnswerChecker(TaskConfig(verifier_deadline_s=1.0)) as checker:
        trajectory = episode(answer)
        task = Task("t1", "f", [{"role": "user", "content": "?"}], "42", verifier)
        config = RewardConfig([Named("outcome", options), Named("format")])
        await RewardPipeline(config, checker).score(trajectory, task)
    return trajectory


@pytest.mark.parametrize(
    ("verifier", "answer", "options", "reward"),
    [
        ("math", "84/2", {}, 1.0),
        ("math", "43", {}, 0.0),
        (OWN + "shout", "LOUD", {}, 0.5),
        (OWN + "shout", "LOUD", {"partial_credit": False}, 0.0),
        (OWN + "returns", "one", {"partial_credit": False}, 1.0),
    ],
)
async def test_the_verifiers_score_is_the_reward(verifier, answer, options, reward):
    assert (await score(verifier, answer, **options)).rewards == {"outcome": reward}


@pytest.mark.parametrize(
    ("name", "answer", "reason"),
    [
        ("sleeps", "60", "did not answer within 1 s"),
        ("dies", "exit", "took its process down"),
        ("returns", "nan", "returned nan"),
    ],
)
async def test_a_verifier_that_fails_makes_the_reward_missing(name, answer, reason):
    trajectory = await score(OWN + name, answer)
    assert trajectory.outcome is Outcome.REWARD_MISSING
    assert reason in trajectory.metadata["reward_missing"]
    assert (trajectory.rewards, trajectory.turns[0].rewards) == ({}, {})
