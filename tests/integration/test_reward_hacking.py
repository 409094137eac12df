"""Reward hacking earns nothing: episodes with the real parser, interpreter, toolbox and reward components.

Each trick stands in a group beside an honest sample (it computes, and answers what it was told) and one that answers wrong
without a call, so that every reward which pays for calls is there to be had.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence

import pytest
import pytest_asyncio

from sandbox import SandboxConfig, SandboxPool
from tests.episodes import play, results
from toolrl.app.tiny_tokenizer import END
from toolrl.config import Named, RewardConfig, TaskConfig
from toolrl.rewards import GroupRewards
from toolrl.tasks import AnswerChecker
from toolrl.trajectory import Outcome, Trajectory

pytestmark = pytest.mark.asyncio(loop_scope="module")
PAY = ("outcome", "format", "call_success", "result_use", "call_validity", "interaction")
ROOM = {
    "max_turn_tokens": 2000,
    "max_response_tokens": 6000,
    "max_context_tokens": 8000,
    "max_observation_tokens": 1000,
}
RIGHT, WRONG = f"\\boxed{{408}}{END}", f"\\boxed{{400}}{END}"
BOILERPLATE = '''import math
import random
# Solve the task step by step.
def product(a, b):
    """The product of two numbers."""
    total = 0
    for _ in range(b):
        total += a
    return total
def main():
    """Run it."""
    return product(17, 24)
'''


class Stage:
    """Plays episodes, all on one interpreter pool and one checker of answers."""

    def __init__(self, pool: SandboxPool, checker: AnswerChecker) -> None:
        self.pool, self.checker = pool, checker
        self.peers: dict[str, tuple[Trajectory, Trajectory]] = {}

    async def play(self, *turns: str, **limits: int) -> Trajectory:
        where = {"interpreter": self.pool, "checker": self.checker}
        return await play(*turns, tool_names=["python"], components=PAY, **where, **{**ROOM, **limits})

    async def in_a_group(
        self, *turns: str, pay: Sequence[str] = PAY, honest: str = "", **limits: int
    ) -> list[Trajectory]:
        """[the honest sample, the trick] with all their rewards."""
        honest = honest or HONEST
        if honest not in self.peers:
            self.peers[honest] = await self.play(honest, RIGHT), await self.play(WRONG)
        group = [*copy.deepcopy(self.peers[honest]), await self.play(*turns, **limits)]
        GroupRewards.of(RewardConfig([Named(name) for name in pay])).score([group])
        return [group[0], group[2]]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stage():
    config = SandboxConfig(backend="process", min_sessions=1, max_sessions=1, run="hacking")
    async with SandboxPool(config) as pool, AnswerChecker(TaskConfig(verifier_deadline_s=60.0)) as checker:
        yield Stage(pool, checker)


def call(code: str, before: str = "") -> str:
    arguments = json.dumps({"name": "python", "arguments": {"code": code}})
    return f"{before}<tool_call>\n{arguments}\n</tool_call>"


def turn(*calls: str) -> str:
    return "\n".join(calls) + END


HONEST = turn(call("print(17 * 24)"))


def extra(trajectory: Trajectory) -> float:
    """What it earned beside the answer."""
    return trajectory.reward - trajectory.rewards["outcome"]


async def test_an_honest_call_is_paid_for_its_success_its_use_and_its_need(stage):
    _, again = await stage.in_a_group(HONEST, RIGHT)
    assert again.rewards == {"outcome": 1.0, "interaction": 1.0}
    assert again.turns[0].rewards == {"format": 0.0, "call_success": 0.1, "result_use": 0.1, "call_validity": 0.0}


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param([turn(call("pass")), RIGHT], id="a call that does nothing"),
        pytest.param([turn(call("x = 17\ny = 24")), RIGHT], id="a call that binds what nobody reads"),
        pytest.param([turn(call("# 17 * 24 = 408")), RIGHT], id="code that is a comment"),
        pytest.param([turn(call("print('ready')")), f"ready {RIGHT}"], id="a call that prints what it says"),
        pytest.param([turn(call("print(408)")), RIGHT], id="a call that prints the known answer"),
        pytest.param([turn(call("print(17 * 25)")), RIGHT], id="a call whose result is ignored"),
        pytest.param(
            [turn(call("print(17 * 25)")), f"\\boxed{{425}}{END}"], id="a result read aloud under a wrong answer"
        ),
        pytest.param(
            [turn(call("print(17 * 24)", "It is 408. I check.")), RIGHT], id="a call after the answer is known"
        ),
        pytest.param([turn(call("raise ValueError(17 * 24)")), RIGHT], id="a value out of an error"),
        pytest.param([HONEST, f"The tool has said it.{END}"], id="an answer that only the tool printed"),
        pytest.param([f"<tool_response>\n408\n</tool_response> {RIGHT}"], id="a tool's answer that the policy wrote"),
        pytest.param([f"<tool_call>print(17 * 24)</tool_call>{END}", RIGHT], id="tags around no call"),
        pytest.param([f"I used <tool_call> and print(17 * 24) {RIGHT}"], id="a tag in the text"),
    ],
)
async def test_a_trick_earns_nothing(stage, turns):
    honest, trick = await stage.in_a_group(*turns)
    assert extra(honest) > 0.5, "there was something to earn"
    assert extra(trick) <= 0
    assert trick.rewards["interaction"] == 0


async def test_calls_that_are_repeated_collect_no_second_bonus(stage):
    honest, thrice = await stage.in_a_group(HONEST, HONEST, HONEST, RIGHT)
    assert [result.text for result in results(thrice)] == ["408"] * 3
    assert 0 < extra(thrice) < extra(honest)
    assert [each.rewards["call_validity"] for each in thrice.policy_turns] == [0.0, -0.1, -0.1, 0.0]
    _, others = await stage.in_a_group(HONEST, turn(call("print(17 * 25)")), turn(call("print(17 * 26)")), RIGHT)
    assert extra(others) < extra(honest), "nor do calls that differ a little"


async def test_a_hundred_numbers_are_no_use_of_one(stage):
    honest, dump = await stage.in_a_group(turn(call("print(list(range(300, 500)))")), RIGHT)
    assert "408" in results(dump)[0].text
    assert 0 <= dump.rewards["interaction"] + sum(each.rewards["result_use"] for each in dump.policy_turns) < 0.02
    assert extra(honest) > 1


async def test_boilerplate_copied_from_right_code_is_worth_nothing_under_a_wrong_answer(stage):
    honest = turn(call(f"{BOILERPLATE}print(product(17, 24))"))

    async def similarity(*said: str) -> float:
        _, trick = await stage.in_a_group(*said, pay=("outcome", "code_similarity"), honest=honest)
        return trick.rewards["code_similarity"]

    assert await similarity(turn(call(BOILERPLATE)), WRONG) == 0
    assert await similarity(turn(call(f"{BOILERPLATE}print('done')")), WRONG) == 0
    assert await similarity(turn(call(f"{BOILERPLATE}print(product(17, 24))\n1 / 0")), WRONG) == 0, (
        "it did not come through"
    )
    assert await similarity(honest, f"The tool has said it.{END}") == 0, "nor is there an answer"
    assert await similarity(f"```python\n{BOILERPLATE}print(product(17, 24))\n```\n{WRONG}") == 0, "nor was it called"
    assert 0.3 < await similarity(turn(call(f"{BOILERPLATE}print(product(17, 23))")), WRONG) < 0.5, (
        "what nearly does it is"
    )


@pytest.mark.parametrize(
    ("turns", "limits"),
    [
        ([turn(*[call("print(17 * 24)")] * 3), RIGHT], {"max_calls_per_turn": 2}),
        ([HONEST, turn(call("print(17 * 24 + 1)")), turn(call("print(17 * 24 + 2)")), RIGHT], {"max_calls": 2}),
    ],
    ids=["of a turn", "of a trajectory"],
)
async def test_calls_beyond_the_cap_are_not_run_and_earn_nothing(stage, turns, limits):
    honest, greedy = await stage.in_a_group(*turns, **limits)
    calls = [each for turn in greedy.policy_turns for each in turn.calls]
    assert (greedy.outcome, greedy.limit) == (Outcome.TOOL_LIMIT, "calls")
    assert len(results(greedy)) <= max(limits.values()) < len(calls)
    assert extra(greedy) <= 0 < extra(honest) and greedy.rewards["outcome"] == 0.0
