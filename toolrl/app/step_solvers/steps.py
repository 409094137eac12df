"""What a step solver is: a question's answer in steps, each of which needs the interpreter's state of those before it.

Invariants:
- A solver reads the question's text alone, as the policy will; numbers are copied as they are written, and what a step
  computes stands in no later step but by its name.
- Every call is needed: without it the last one fails or prints something else (`needed.py` checks the names, the tests run
  it). A question whose answer takes fewer steps is not filled up: it gives no trace.
- A program reads no name but those that earlier programs of its question set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from toolrl.app.cold_start_solvers import NoSolver
from toolrl.app.step_solvers.needed import unneeded
from toolrl.config import RunConfig
from toolrl.registry import Registry
from toolrl.tasks import TaskSource

LOOKED_AT = 3000  # questions, to find for each family one that takes enough steps


@dataclass(frozen=True)
class Step:
    """Statements that change the state, and the expressions that the call prints of it."""

    code: str
    show: str


# (question, how many calls there may be) -> steps. A solver that can choose how far one step goes aims at that many; others
# give as many as the question takes.
StepSolver = Callable[[str, int], list[Step]]
step_solvers: Registry[StepSolver] = Registry("step solver")

S = TypeVar("S", bound=StepSolver)


def grows_with(*options: str) -> Callable[[S], S]:
    """Marks a solver with its family's options that make a question take more steps, for the message that asks for them."""

    def mark(solver: S) -> S:
        solver.grows_with = options  # type: ignore[attr-defined]
        return solver

    return mark


class TooFewSteps(NoSolver):
    """The answer to this question takes fewer steps than were asked for; `steps` says how many."""

    def __init__(self, family: str, question: str, steps: int, least: int) -> None:
        super().__init__(f"{family}: {question!r} takes {steps} calls, {least} are asked for")
        self.steps = steps


def step_programs(family: str, question: str, calls: int, least: int) -> list[str]:
    """[least … calls] the programs of a trace: one step each, or several where the question takes more than `calls`.

    Raises:
        NoSolver: the family has no step solver, or its solver does not understand the question.
        TooFewSteps: the question takes fewer than `least`, or one of them does nothing for the answer.
    """
    if family not in step_solvers:
        raise NoSolver(
            f"tasks of family {family!r} have no step solver, so no dense traces can be generated for them; give "
            "ready-made traces with cold_start.traces_path=FILE, set cold_start.dense=false, skip the cold start with "
            f"cold_start.steps=0, or use families that have one: {', '.join(step_solvers.names())}"
        )
    steps = step_solvers.get(family)(question, calls)
    if len(steps) < least:
        raise TooFewSteps(family, question, len(steps), least)
    programs = merged(steps, min(calls, len(steps)))
    if idle := unneeded(programs):  # a solver may only see while it computes that a step adds nothing
        raise TooFewSteps(family, question, min(least - 1, len(programs) - len(idle)), least)
    return programs


def merged(steps: Sequence[Step], calls: int) -> list[str]:
    """[calls] programs that take the steps in order, as evenly as whole steps allow; each prints after its last one."""
    ends = [len(steps) * (call + 1) // calls for call in range(calls)]
    programs, start = [], 0
    for end in ends:
        code = "\n".join(step.code for step in steps[start:end])
        separator = "\n" if "\n" in code else "; "
        programs.append(f"{code}{separator}print({steps[end - 1].show})")
        start = end
    return programs


def check_families(config: RunConfig, source: TaskSource, first_task: int) -> None:
    """Whether dense traces can be made for every task family of the run.

    Raises:
        NoSolver: names the first for which none can, and what to do.
    """
    wanted = {family.name for family in config.tasks.families}
    settings = config.cold_start
    longest: dict[str, tuple[int, int]] = {}  # family -> (questions seen, most steps)
    for index in range(first_task, first_task + LOOKED_AT):
        task = source.task(index)
        seen, most = longest.get(task.family, (0, 0))
        if most >= settings.min_calls:
            continue
        try:
            steps = len(step_programs(task.family, task.question, settings.max_calls, settings.min_calls))
        except TooFewSteps as error:
            steps = error.steps
        longest[task.family] = (seen + 1, max(most, steps))
        if wanted <= longest.keys() and all(most >= settings.min_calls for _, most in longest.values()):
            return
    for family, (seen, most) in longest.items():
        if most < settings.min_calls:
            options = getattr(step_solvers.get(family), "grows_with", ())
            larger = f"enlarge its options ({', '.join(options)}), " if options else ""
            raise NoSolver(
                f"cold_start.min_calls={settings.min_calls}: none of {seen} questions of family {family!r} takes so many "
                f"steps (at most {most}), and calls that do nothing are not added; {larger}lower cold_start.min_calls, leave the "
                "family out, or give ready-made traces with cold_start.traces_path=FILE"
            )
