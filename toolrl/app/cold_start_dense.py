"""Interaction-dense cold-start traces: at least `cold_start.min_calls` calls that ran, each of them needed, and a right answer.

Invariants:
- What is kept was filtered by execution, not by plan: its calls ran, each gave something new, the verifier gave the answer
  its full score, and the run's own limits would let the policy play it.
- Tasks are taken in order, so the traces depend on settings and seed alone.
- A family without such traces is refused before any program runs; where too few are left, the reasons are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice, pairwise

from toolrl.app.cold_start_plan import Plan, plan
from toolrl.app.step_solvers import TooFewSteps, check_families
from toolrl.config import RolloutConfig, RunConfig
from toolrl.errors import UserError
from toolrl.tasks import AnswerChecker, Task, TaskSource, VerifierFailed
from toolrl.trajectory import Trajectory

# Plays plans of tasks; traces are counted from the index on.
PlayPlans = Callable[[Sequence[Task], Sequence[Plan], int], Awaitable[list[Trajectory]]]

FIRST_WAVE = 32  # traces: settings that leave none show themselves early
MOST_PLAYED = 4  # times as many traces as are asked for
MOST_LOOKED_AT = 200  # times as many questions


async def dense_traces(config: RunConfig, source: TaskSource, play: PlayPlans, first_task: int) -> list[Trajectory]:
    """[cold_start.traces] dense traces, of the source's tasks from `first_task` on.

    Raises:
        NoSolver: a task family for which none can be made.
        UserError: too few are left of those that were played.
    """
    wanted = config.cold_start.traces
    check_families(config, source, first_task)
    planned = _plans(config, source, first_task)
    kept: list[Trajectory] = []
    dropped: Counter[str] = Counter()
    played = 0
    async with AnswerChecker(config.tasks) as checker:
        while len(kept) < wanted:
            missing = wanted - len(kept)
            wave = list(islice(planned, min(missing, FIRST_WAVE) if not played else missing))
            if not wave or played >= MOST_PLAYED * wanted:
                raise _too_few(config, len(kept), played, dropped)
            traces = await play([task for task, _ in wave], [drawn for _, drawn in wave], played)
            played += len(wave)
            for (task, _), trace in zip(wave, traces, strict=True):
                if (why := await _why_not(trace, task, config, checker)) is None:
                    kept.append(trace)
                else:
                    dropped[why] += 1
            if not kept and played >= FIRST_WAVE:
                raise _too_few(config, 0, played, dropped)
    return kept


def _plans(config: RunConfig, source: TaskSource, first_task: int) -> Iterator[tuple[Task, Plan]]:
    """The tasks whose answer takes enough steps, each with its plan."""
    settings = config.cold_start
    found = 0
    for looked_at in range(MOST_LOOKED_AT * settings.traces):
        task = source.task(first_task + looked_at)
        try:
            drawn = plan(task, settings, config.seed, found)
        except TooFewSteps:
            continue
        found += 1
        yield task, drawn


async def _why_not(trace: Trajectory, task: Task, config: RunConfig, checker: AnswerChecker) -> str | None:
    """Why the trace is not kept, in words that name the remedy; None for one that is."""
    why = why_not_dense(trace, config.cold_start.min_calls) or beyond_limits(trace, config.rollout)
    if why is not None:
        return why
    try:
        score = await checker.check(task, trace.answer)
    except VerifierFailed as error:
        return f"the verifier gave no score ({error})"
    return None if score >= 1.0 else f"the answer is wrong (family {task.family})"


def why_not_dense(trace: Trajectory, min_calls: int) -> str | None:
    """Of what was recorded: did enough calls really run, and did each give something new?

    A call that failed on purpose, or that could not be read, shows how to go on; it counts for nothing.
    """
    results = [result for of_turn in trace.results_of_turns() for result in of_turn]
    meant = [result for result in results if not result.injected and result.status != "invalid_call"]
    if failed := next((result for result in meant if result.status != "ok"), None):
        return f"a call did not run to its end ({failed.status})"
    if len(meant) < min_calls:
        return f"fewer than cold_start.min_calls={min_calls} calls ran"
    if any(before.text == after.text for before, after in pairwise(meant)):
        return "a call changed nothing"
    return None


def beyond_limits(trace: Trajectory, limits: RolloutConfig) -> str | None:
    """The run's limit that an episode like the trace would meet, with its remedy; None when it could be played."""
    if any(result.truncated for of_turn in trace.results_of_turns() for result in of_turn):
        return "a result was cut; raise rollout.max_observation_tokens"
    longest = max(len(turn.token_ids) for turn in trace.policy_turns)
    calls = sum(len(turn.calls) + len(turn.call_errors) for turn in trace.policy_turns)
    response = len(trace.token_ids) - len(trace.prompt_ids)
    for value, name in (
        (longest, "max_turn_tokens"),
        (response, "max_response_tokens"),
        (len(trace.token_ids), "max_context_tokens"),
        (len(trace.policy_turns), "max_turns"),
        (calls, "max_calls"),
    ):
        if value > getattr(limits, name):
            return f"longer than rollout.{name}={getattr(limits, name)} allows; raise it"
    return None


def _too_few(config: RunConfig, kept: int, played: int, dropped: Counter[str]) -> UserError:
    reasons = "; ".join(f"{count} × {why}" for why, count in dropped.most_common(4))
    return UserError(
        f"cold_start.dense: {kept} traces are left of {played} that were made, cold_start.traces={config.cold_start.traces} are "
        f"asked for: {reasons or 'too few questions take enough steps'}. Or lower cold_start.min_calls or cold_start.traces"
    )
