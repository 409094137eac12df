"""How much room an episode has left, and what of its tools' results fits into it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from toolrl.config import RolloutConfig
from toolrl.conversation import ChatFormat, ObservationTooLong
from toolrl.trajectory import LimitName, ToolResult, Trajectory, Turn

_LONG_CHARACTERS = 4096  # tokenising more takes milliseconds: it leaves the event loop to the other episodes


def room_for_turn(trajectory: Trajectory, config: RolloutConfig) -> tuple[int, LimitName]:
    """How many tokens the next policy turn may have, and the limit that says so."""
    return min([*_limits(trajectory, config), (config.max_turn_tokens, "turn_tokens")], key=lambda limit: limit[0])


def _limits(trajectory: Trajectory, config: RolloutConfig) -> list[tuple[int, LimitName]]:
    response = sum(len(turn.token_ids) for turn in trajectory.turns if not turn.fresh_context)
    return [
        (config.max_response_tokens - response, "response_tokens"),
        (config.max_context_tokens - len(trajectory.context_ids), "context_tokens"),
    ]


async def observe(
    trajectory: Trajectory, results: Sequence[ToolResult], chat: ChatFormat, config: RolloutConfig
) -> tuple[list[int], LimitName | None]:
    """The ids of the tool turn that follows the trajectory's last turn; `text` and `truncated` of the results become
    what the model sees.

    Returns:
        The ids and None; or no ids and the limit that leaves no room for as much as an empty observation.
    """
    room, limit = min(_limits(trajectory, config), key=lambda each: each[0])
    room -= 1  # one token at least is left for an answer
    budget = min(config.max_observation_tokens, room)
    turn = trajectory.turns[-1]
    try:
        return await _ids(turn, results, budget, chat, config), None
    except ObservationTooLong as error:  # not even an empty observation fits
        least = budget + error.needed - error.budget
        if least > room:
            return [], limit
        # It does fit the room: `max_observation_tokens` cuts results, it ends no episode.
        return await _ids(turn, results, least, chat, config), None


async def _ids(
    turn: Turn, results: Sequence[ToolResult], budget: int, chat: ChatFormat, config: RolloutConfig
) -> list[int]:
    cut = config.truncate_observation
    if sum(len(result.text) for result in results) > _LONG_CHARACTERS:
        return await asyncio.to_thread(chat.observation_ids, turn, results, budget, cut)
    return chat.observation_ids(turn, results, budget, cut)
