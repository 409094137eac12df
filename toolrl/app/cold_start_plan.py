"""What each cold-start trace will show, drawn before anything runs: pure, and the same for the same seed.

A start that is weak on purpose makes mistakes in known shares, so that the reinforcement learning after it has
something to put right: guesses without a call, calls that break the format, code that computes something else, giving
up after a failure.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Literal

from toolrl.app.cold_start_solvers import programs
from toolrl.app.step_solvers import step_programs
from toolrl.config import ColdStartConfig
from toolrl.tasks import Task

Kind = Literal["direct", "malformed", "wrong_code", "solved"]
_NUMBER = re.compile(r"\d+")
_OPERATOR = re.compile(r" ([-+*]) ")
_SWAPPED = {"math.gcd": "math.lcm", "math.lcm": "math.gcd", "count('1')": "count('0')"}


@dataclass(frozen=True)
class Plan:
    """One trace: its programs in order, and what goes wrong on the way."""

    kind: Kind
    programs: list[str]  # empty for a direct guess
    guess: str  # the answer of a trace that computes none
    first_call_fails: bool = False
    gives_up: bool = False  # guesses after the failure or the malformed call, instead of calling again
    malformation: int = 0  # which way of breaking the format


def plan(task: Task, config: ColdStartConfig, seed: int, index: int) -> Plan:
    """The plan of trace `index`.

    Raises:
        NoSolver: no solver knows the task; TooFewSteps where a dense one would have fewer calls than were asked for.
    """
    draw = random.Random(f"{seed}/cold-start/{index}")
    calls = draw.randint(config.min_calls, max(config.min_calls, config.max_calls))
    if config.dense:
        solution = step_programs(task.family, task.question, calls, config.min_calls)
    else:
        solution = programs(task.family, task.question, calls)
    guess = draw.choice(_NUMBER.findall(task.question) or ["0"])
    share = draw.random()
    fails = draw.random() < config.retry_share
    # The policy that these traces show is as quick to guess after a setback as it is at the start.
    gives_up = draw.random() < config.direct_guess_share
    malformation = draw.randrange(1 << 16)
    if share < config.direct_guess_share:
        return Plan("direct", [], guess)
    share -= config.direct_guess_share
    if share < config.malformed_call_share:
        return Plan("malformed", solution, guess, gives_up=gives_up, malformation=malformation)
    share -= config.malformed_call_share
    if share < config.wrong_code_share:
        return Plan("wrong_code", [*solution[:-1], wrong(solution[-1], draw)], guess, fails, fails and gives_up)
    return Plan("solved", solution, guess, fails, fails and gives_up)


def wrong(program: str, draw: random.Random) -> str:
    """A program near `program` that computes something else: another operation, or a number's digits turned round."""
    changes = []
    if operator := _OPERATOR.search(program):
        others = [sign for sign in "+-*" if sign != operator.group(1)]
        changes.append(program[: operator.start(1)] + draw.choice(others) + program[operator.end(1) :])
    changes += [program.replace(name, other) for name, other in _SWAPPED.items() if name in program]
    numbers = [match for match in _NUMBER.finditer(program) if match.group(0)[::-1] != match.group(0)]
    if numbers:
        number = draw.choice(numbers)
        # No leading zero: Python would not read such a number.
        turned = number.group(0)[::-1].lstrip("0")
        changes.append(program[: number.start()] + turned + program[number.end() :])
    return draw.choice(changes) if changes else program + "; print(0)"
