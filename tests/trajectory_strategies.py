"""Hypothesis strategies for trajectories, from plain to nasty."""

from __future__ import annotations

from typing import Any, get_args

from hypothesis import strategies as st

from toolrl.trajectory import CallError, LimitName, Outcome, ToolCall, ToolResult, ToolStatus, Trajectory, Turn

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
finite = st.floats(allow_nan=False, allow_infinity=False)
tokens = st.integers(0, 300_000)
token_lists = st.one_of(st.lists(tokens, max_size=12), st.lists(st.integers(0, 255), max_size=12))
logprobs = st.one_of(finite, st.floats(width=32, allow_nan=False))
named_rewards = st.dictionaries(names, finite, max_size=3)


def json_values(text: st.SearchStrategy[str], integers: st.SearchStrategy[int]) -> st.SearchStrategy[Any]:
    """Whatever JSON can hold."""
    leaves = st.none() | st.booleans() | integers | finite | text
    return st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3), max_leaves=6
    )


@st.composite
def policy_turns(draw: st.DrawFn, arguments: st.SearchStrategy[Any]) -> Turn:
    ids = draw(token_lists)
    n = len(ids)
    return Turn(
        "policy",
        ids,
        draw(st.lists(logprobs, min_size=n, max_size=n)),
        draw(st.lists(st.integers(0, 70_000), min_size=n, max_size=n)),
        draw(st.sampled_from(["stop", "length", "abort"])),
        draw(names),
        draw(st.lists(st.builds(ToolCall, names, names, st.dictionaries(names, arguments, max_size=2)), max_size=2)),
        draw(st.lists(st.builds(CallError, names, names), max_size=1)),
        draw(named_rewards),
    )


results = st.builds(
    ToolResult,
    names,
    names,
    st.sampled_from(get_args(ToolStatus)),
    names,
    st.booleans(),
    finite,
    finite,
    finite,
    st.integers(min_value=0, max_value=2**40),
    st.booleans(),
)
tool_turns = st.builds(lambda ids, found: Turn("tool", ids, results=found), token_lists, st.lists(results, max_size=2))


def trajectories(arguments: st.SearchStrategy[Any] | None = None) -> st.SearchStrategy[Trajectory]:
    """Trajectories whose recorded turns do not contradict themselves."""
    plain = json_values(names, st.integers(-(2**63), 2**63 - 1)) if arguments is None else arguments
    return st.builds(
        Trajectory,
        id=names,
        group_id=names,
        task_id=names,
        sample_index=st.integers(0, 1000),
        prompt_ids=token_lists,
        turns=st.lists(policy_turns(plain) | tool_turns, max_size=4),
        outcome=st.none() | st.sampled_from(Outcome),
        limit=st.none() | st.sampled_from(get_args(LimitName)),
        answer=st.none() | names,
        rewards=named_rewards,
        temperature=finite,
        timings=named_rewards,
        metadata=st.dictionaries(names, plain, max_size=2),
    )
