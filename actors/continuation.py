"""Going on with an episode at a turn boundary: in its own seat (on another worker, after a fault) or in a new one (a
branch).

A boundary is the end of a whole turn: of a tool turn, or of a policy turn whose calls have not been run yet.

- The prefix is copied as it was recorded: ids, log-probabilities and the weight version of each token.
- What the episode's tools know is rebuilt by running the recorded calls in a fresh session. Where the model would now
  see something else (randomness, time), that is a `Change`; `rollout.on_changed_replay` says what becomes of it.
- A deferred call whose result the prefix does not hold is made again; its result comes when it comes.
- Sampling goes on by the turn's index: the same seat under the same weights samples what it would have sampled.
- The prefix keeps its age: staleness counts from its oldest token.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from actors.seat import Seat
from toolrl.tools import ToolboxSession
from toolrl.trajectory import STOPPED, ToolCall, ToolResult, Trajectory

_SHOWN_CHARACTERS = 200

# Cuts results to what the model sees of them, in the place that follows the trajectory's last turn.
See = Callable[[Trajectory, Sequence[ToolResult]], Awaitable[object]]


@dataclass(frozen=True)
class Change:
    """A recorded call that gives something else when it is run again."""

    turn: int  # index of the tool turn
    call_id: str
    recorded: str  # status and the beginning of the text
    replayed: str


def prefix_of(trajectory: Trajectory, policy_turns: int | None = None) -> Trajectory:
    """An unfinished, unscored copy up to a turn boundary.

    Args:
        policy_turns: how many policy turns it keeps, each with its tool turn. None: all up to the last boundary, which
            leaves out the turn that ended the episode.

    Raises:
        ValueError: there are not so many.
    """
    turns = trajectory.turns
    starts = [index for index, turn in enumerate(turns) if turn.kind == "policy"]
    if policy_turns is not None:
        whole = sum(index + 1 < len(turns) for index in starts)
        if not 0 <= policy_turns <= whole:
            raise ValueError(
                f"trajectory {trajectory.id} has {whole} policy turns with a tool turn; it cannot be cut after {policy_turns}"
            )
        turns = turns[: [*starts, len(turns)][policy_turns]]
    elif trajectory.outcome is not None:
        turns = turns[: starts[-1]] if starts else []
    return replace(
        trajectory,
        turns=[replace(turn, rewards={}) for turn in turns],
        outcome=None,
        limit=None,
        answer=None,
        rewards={},
        timings=dict(trajectory.timings),
        metadata=dict(trajectory.metadata),
    )


def continued(progress: Trajectory, seat: Seat) -> Trajectory:
    """A copy of `progress` up to its last boundary, to be played on in `seat`. Its metadata say where it was taken up."""
    trajectory = prefix_of(progress)
    turns = len(trajectory.policy_turns)
    if seat.trajectory_id != progress.id:
        trajectory.metadata["branched_from"] = {"id": progress.id, "policy_turns": turns}
        trajectory.metadata.pop("continued_after", None)
    else:
        earlier = trajectory.metadata.get("continued_after", [])
        trajectory.metadata["continued_after"] = [*earlier, turns]  # policy turns, one number for each time
    return replace(trajectory, id=seat.trajectory_id, group_id=seat.group_id, sample_index=seat.sample_index)


async def rebuild(
    trajectory: Trajectory, tools: ToolboxSession, see: See, *, as_late: Callable[[ToolResult], ToolResult]
) -> list[Change]:
    """Brings a fresh session of the tools to where the recorded calls left theirs. Returns what came out differently.

    Args:
        as_late: makes of a deferred call's result what is delivered.

    Raises:
        toolrl.tools.InfraError: a tool's machinery died.
    """
    delivered = {id(receipt): result for receipt, result in _late_results(trajectory)}
    replayed: dict[int, ToolResult] = {}  # id of the recorded result -> what the call gives now
    for call, was in _calls_and_answers(trajectory):
        if was.status == "pending" and id(was) not in delivered:
            tools.make_again(call)
            continue
        recorded = delivered.get(id(was), was)
        again = await tools.replay(call, recorded)
        if again is not None:
            replayed[id(recorded)] = again if recorded is was else as_late(again)
    changes: list[Change] = []
    for index, turn in enumerate(trajectory.turns):
        if any(id(was) in replayed for was in turn.results):
            results = [replayed.get(id(was)) or replace(was) for was in turn.results]
            await see(replace(trajectory, turns=trajectory.turns[:index]), results)
            changes += [
                Change(index, was.call_id, _said(was), _said(now))
                for was, now in zip(turn.results, results, strict=True)
                if was.status != now.status or (was.text != now.text and was.status not in STOPPED)
            ]
    return changes


def _calls_and_answers(trajectory: Trajectory) -> Iterator[tuple[ToolCall, ToolResult]]:
    """Each call with its result or receipt: these come first in a tool turn, in the calls' order."""
    for turn, shown in itertools.pairwise(trajectory.turns):
        if turn.kind == "policy":
            yield from zip(turn.calls, shown.results, strict=False)


def _late_results(trajectory: Trajectory) -> Iterator[tuple[ToolResult, ToolResult]]:
    """Each receipt with the result that came later."""
    receipts: dict[str, ToolResult] = {}
    for turn in trajectory.turns:
        for result in turn.results:
            if result.status == "pending":
                receipts[result.call_id] = result
            elif result.call_id in receipts:
                yield receipts.pop(result.call_id), result


def changes_while_parked(trajectory: Trajectory, tools: ToolboxSession) -> list[Change]:
    """Calls that gave something else when a session that had been freed was needed again."""
    turns = {
        result.call_id: index
        for index, turn in enumerate(trajectory.turns)
        for result in turn.results
        if result.status != "pending"
    }
    return [
        Change(turns.get(change.call_id, len(trajectory.turns)), change.call_id, change.recorded, change.replayed)
        for change in tools.sessions.changes
    ]


def _said(result: ToolResult) -> str:
    return f"{result.status}: {result.text[:_SHOWN_CHARACTERS]}"


def as_metadata(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """For `metadata["replay_changed"]`."""
    return [asdict(change) for change in changes]
