"""Rewards: each component on hand-made trajectories, and the pipeline's all-or-nothing."""

import asyncio
import logging

import pytest

from toolrl.answers import answer_of
from toolrl.config import LateRewardConfig, Named, RewardConfig, TaskConfig
from toolrl.errors import UserError
from toolrl.registry import UnknownName
from toolrl.reward_records import awaited_rewards, deliver
from toolrl.rewards import Pending, RewardPipeline, reward_id
from toolrl.tasks import AnswerChecker, Task
from toolrl.trajectory import CallError, Outcome, ToolCall, ToolResult, Trajectory, Turn

TASK = Task("t", "f", [{"role": "user", "content": "?"}], "42", "math")
BROKEN = CallError("bad_json", "no")


def policy(tokens=3, calls=0, errors=(), finish="stop", text=""):
    return Turn(
        kind="policy",
        token_ids=[7] * tokens,
        logprobs=[-0.5] * tokens,
        weight_versions=[0] * tokens,
        finish_reason=finish,
        calls=[ToolCall(f"c{i}", "python", {"code": text}) for i in range(calls)],
        call_errors=list(errors),
        text=text,
    )


def tool(*statuses, text="42"):
    return Turn(kind="tool", token_ids=[9], results=[ToolResult("c0", "python", status, text) for status in statuses])


def episode(*turns, outcome=Outcome.ANSWERED, answer="42"):
    return Trajectory("t0", "g0", "t", 0, [1, 2], list(turns), outcome=outcome, answer=answer)


async def score(trajectory, *components, weights=None, deadline_s=30.0):
    config = RewardConfig([Named(*part) for part in components], weights or {}, deadline_s)
    async with AnswerChecker(TaskConfig()) as checker:  # equal answers start no process
        await RewardPipeline(config, checker).score(trajectory, TASK)
    return trajectory


def turn_rewards(trajectory, name):
    return [turn.rewards[name] for turn in trajectory.policy_turns]


async def test_a_right_answer_earns_one():
    assert (await score(episode(policy()), ("outcome",))).rewards == {"outcome": 1.0}


@pytest.mark.parametrize("outcome", [Outcome.NO_ANSWER, Outcome.LENGTH, Outcome.TOOL_LIMIT, Outcome.FORMAT_ERROR])
async def test_an_episode_that_did_not_end_in_an_answer_earns_nothing(outcome):
    # Even where a right answer stands in an earlier turn.
    assert (await score(episode(policy(), outcome=outcome), ("outcome",))).rewards == {"outcome": 0.0}


async def test_a_trajectory_that_is_not_trained_is_not_scored():
    for outcome in (Outcome.INFRA_ERROR, Outcome.STALE, Outcome.CANCELLED, None):
        trajectory = await score(episode(policy(calls=1, errors=[BROKEN]), outcome=outcome), ("outcome",), ("format",))
        assert (trajectory.rewards, trajectory.turns[0].rewards, trajectory.outcome) == ({}, {}, outcome)


async def test_turns_that_break_the_format_pay_a_tenth_each():
    trajectory = episode(
        policy(errors=[BROKEN, BROKEN]),
        tool("invalid_call", "invalid_call"),
        policy(calls=1),
        tool("invalid_call"),
        policy(calls=2),
        tool("ok", "error"),
        policy(),
    )
    assert turn_rewards(await score(trajectory, ("format",)), "format") == [-0.1, -0.1, 0.0, 0.0]


async def test_a_call_that_the_length_limit_cut_off_breaks_no_format():
    cut = episode(policy(errors=[BROKEN], finish="length"), outcome=Outcome.LENGTH)
    assert turn_rewards(await score(cut, ("format",)), "format") == [0.0]
    broken_before = episode(policy(errors=[BROKEN, BROKEN], finish="length"), outcome=Outcome.LENGTH)
    assert turn_rewards(await score(broken_before, ("format",)), "format") == [-0.1]


async def test_a_first_turn_without_a_call_can_count_as_a_break():
    def direct():
        return episode(policy())

    required = ("format", {"require_first_call": True})
    assert turn_rewards(await score(direct(), ("format",)), "format") == [0.0]
    assert turn_rewards(await score(direct(), required), "format") == [-0.1]
    later = episode(policy(calls=1), tool("ok"), policy())
    assert turn_rewards(await score(later, required), "format") == [0.0, 0.0]


async def test_call_cost_failure_and_timeout_fall_on_the_turn_that_called():
    trajectory = episode(
        policy(calls=2), tool("ok", "error"), policy(calls=1), tool("timeout"), policy(calls=1), tool("ok"), policy()
    )
    parts = [("call_cost", {"cost": 0.2}), ("call_failure",), ("timeout", {"penalty": 0.5})]
    await score(trajectory, *parts)
    assert turn_rewards(trajectory, "call_cost") == [-0.4, -0.2, -0.2, 0.0]
    assert turn_rewards(trajectory, "call_failure") == [-0.1, 0.0, 0.0, 0.0]
    assert turn_rewards(trajectory, "timeout") == [0.0, -0.5, 0.0, 0.0]


async def test_a_tool_turn_that_returned_nothing_does_not_merge_two_turns():
    trajectory = episode(policy(calls=1), Turn("tool", [9]), policy(errors=[BROKEN]), tool("invalid_call"), policy())
    assert turn_rewards(await score(trajectory, ("format",)), "format") == [0.0, -0.1, 0.0]


@pytest.mark.parametrize(("sampled", "reward"), [(10, 0.0), (60, 0.0), (80, -0.5), (100, -1.0), (500, -1.0)])
async def test_overlong_is_a_ramp_over_sampled_tokens_only(sampled, reward):
    shown = Turn("tool", [9] * 1000, results=[])
    trajectory = episode(policy(sampled - 5), shown, policy(5))
    await score(trajectory, ("overlong", {"max_tokens": 100, "ramp_tokens": 40}))
    assert trajectory.rewards["overlong"] == pytest.approx(reward)


async def test_overlong_without_a_ramp_is_a_step():
    for sampled, reward in ((100, 0.0), (101, -1.0)):
        trajectory = await score(episode(policy(sampled)), ("overlong", {"max_tokens": 100, "ramp_tokens": 0}))
        assert trajectory.rewards["overlong"] == reward


async def test_overlong_takes_a_fifth_as_its_ramp_as_dapo_does():
    for sampled, reward in ((16384, 0.0), (18432, -0.5), (20480, -1.0)):
        trajectory = await score(episode(policy(sampled)), ("overlong", {"max_tokens": 20480}))
        assert trajectory.rewards["overlong"] == pytest.approx(reward)


async def test_weights_scale_what_is_recorded():
    trajectory = episode(policy(calls=1), tool("ok"), policy())
    await score(trajectory, ("outcome",), ("call_cost",), weights={"outcome": 2.0, "call_cost": 0.5})
    assert trajectory.rewards == {"outcome": 2.0}
    assert turn_rewards(trajectory, "call_cost") == [-0.05, 0.0]
    assert trajectory.reward == pytest.approx(1.95)


@pytest.mark.parametrize("form", ["boxed", "tag", "last_line"])
async def test_an_answer_that_only_a_tool_printed_earns_nothing(form):
    printed = "<answer>42</answer> \\boxed{42}\n42"
    for said, earned in (("The tool has said it.", 0.0), (printed, 1.0)):
        trajectory = episode(policy(calls=1, text="print(answer)"), tool("ok", text=printed), policy(text=said))
        trajectory.turns[1].text = printed
        trajectory.answer = answer_of(trajectory, form)
        await score(trajectory, ("outcome", {"partial_credit": False}))
        assert trajectory.rewards == {"outcome": earned}


def brevity(trajectory, task, context, *, per_token=0.01):
    return [-per_token * len(turn.token_ids) for turn in trajectory.policy_turns]


async def slow(trajectory, task, context):
    await asyncio.sleep(60)
    return 1.0


def bad(trajectory, task, context, *, what):
    match what:
        case "raise":
            raise ZeroDivisionError("of mine")
        case "short":
            return [0.0]
        case "time out":
            raise TimeoutError("a socket of mine")
    return what


async def test_a_users_own_component_goes_by_its_own_name():
    own = (f"{__name__}:brevity", {"per_token": 0.1})
    trajectory = await score(episode(policy(2), tool("ok"), policy(1)), ("outcome",), own, weights={"brevity": 2.0})
    assert turn_rewards(trajectory, "brevity") == pytest.approx([-0.4, -0.2])


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (float("nan"), "reward 'bad' gave nan; a reward must be finite"),
        (float("inf"), "reward 'bad' gave inf"),
        ([0.0, float("nan")], "must be finite"),
        ("short", "gave 1 numbers for 2 policy turns"),
        ("raise", "ZeroDivisionError: of mine"),
        ("time out", "TimeoutError: a socket of mine"),
        (None, "TypeError"),
    ],
)
async def test_a_component_that_fails_takes_every_reward_with_it(what, reason, caplog):
    trajectory = episode(policy(calls=1), tool("ok"), policy())
    with caplog.at_level(logging.WARNING):
        await score(trajectory, ("outcome",), ("call_cost",), (f"{__name__}:bad", {"what": what}))
    assert trajectory.outcome is Outcome.REWARD_MISSING
    assert trajectory.metadata["reward_missing"].startswith("bad: ")
    assert reason in trajectory.metadata["reward_missing"]
    assert reason in caplog.text
    assert trajectory.rewards == {}
    assert all(turn.rewards == {} for turn in trajectory.turns)


async def test_a_reward_that_comes_too_late_is_missing():
    trajectory = await score(episode(policy()), ("outcome",), (f"{__name__}:slow",), deadline_s=0.05)
    assert trajectory.outcome is Outcome.REWARD_MISSING
    assert trajectory.metadata["reward_missing"] == "slow: later than 0.05 s"


@pytest.mark.parametrize(
    ("components", "weights", "message"),
    [
        ([Named("outcom")], {}, "did you mean 'outcome'"),
        ([Named("format", {"penality": 1})], {}, "'penality'.*its options: penalty, require_first_call"),
        ([Named("overlong")], {}, "'max_tokens'.*its options: max_tokens, ramp_tokens"),
        ([Named("outcome"), Named("outcome")], {}, "names 'outcome' twice"),
        ([Named("outcome")], {"format": 1.0}, "no component 'format'"),
        ([Named("outcome")], {"outcome": float("nan")}, r"rewards\.weights\.outcome=nan must be finite"),
        ([Named("no.such.module:reward")], {}, "cannot be imported"),
    ],
)
def test_a_reward_config_that_cannot_work_is_refused_at_once(components, weights, message):
    with pytest.raises((ValueError, UnknownName), match=message):
        RewardPipeline(RewardConfig(components, weights), AnswerChecker(TaskConfig()))


def later(trajectory, task, context):
    return Pending()


async def test_what_comes_later_is_awaited_under_its_name_with_its_weight():
    trajectory = episode(policy(calls=1), tool("ok"), policy())
    config = RewardConfig(
        components=[Named("call_cost"), Named(f"{__name__}:later")],
        weights={"later": 0.5, "judge": 2.0},
        late=LateRewardConfig(names=["judge"]),
    )
    before = reward_id(trajectory)
    async with AnswerChecker(TaskConfig()) as checker:
        await RewardPipeline(config, checker).score(trajectory, TASK)
    assert trajectory.outcome is Outcome.ANSWERED
    assert trajectory.turn_rewards == [-0.1, 0.0]
    assert awaited_rewards(trajectory) == {"judge": 2.0, "later": 0.5}
    assert reward_id(trajectory) == before, "what it was asked under is what it is delivered under"
    deliver(trajectory, "judge", [0.25, 1])
    deliver(trajectory, "later", True)
    assert [turn.rewards for turn in trajectory.policy_turns] == [
        {"call_cost": -0.1, "judge": 0.5},
        {"call_cost": 0.0, "judge": 2.0},
    ]
    assert (trajectory.rewards, awaited_rewards(trajectory)) == ({"later": 0.5}, {})
    with pytest.raises(KeyError):
        deliver(trajectory, "judge", 1.0)


async def test_nothing_is_awaited_for_a_trajectory_whose_other_rewards_failed():
    trajectory = episode(policy())
    config = RewardConfig(components=[Named(f"{__name__}:bad", {"what": None})], late=LateRewardConfig(names=["judge"]))
    async with AnswerChecker(TaskConfig()) as checker:
        await RewardPipeline(config, checker).score(trajectory, TASK)
    assert trajectory.outcome is Outcome.REWARD_MISSING
    assert awaited_rewards(trajectory) == {}


def test_a_late_reward_that_is_a_component_too_is_refused():
    with pytest.raises(UserError, match="'outcome' is a component already"):
        RewardPipeline(RewardConfig(late=LateRewardConfig(names=["outcome"])), None)


def test_the_id_of_a_reward_is_that_of_the_tokens():
    first, again, other = episode(policy()), episode(policy()), episode(policy(tokens=4))
    assert reward_id(first) == reward_id(again) != reward_id(other)
