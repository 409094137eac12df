"""Running totals: bits, primes, legs; each call adds its part to what the calls before it have counted."""

from __future__ import annotations

import functools
import itertools
import re

from toolrl.app.cold_start_solvers import NoSolver
from toolrl.app.step_solvers.arithmetic import found
from toolrl.app.step_solvers.steps import Step, grows_with, step_solvers

_ASKED = re.compile(r"\d+(?=\?)")
_BETWEEN = re.compile(r"\d+ and \d+")
_ANIMALS = re.compile(r"\d+ [a-z][a-z ]*[a-z]")
_PRIME = "def prime(k):\n    return k > 1 and all(k % d for d in range(2, int(k ** 0.5) + 1))\n"
NUMBERS_A_CALL = 50  # at least: among so many there is almost always a prime


@step_solvers.register("count_bits")
@grows_with("min_n", "max_n")
def count_bits(question: str, calls: int) -> list[Step]:
    """The lowest 1 bit is taken away and counted until nothing is left."""
    number = found(_ASKED, question, "count_bits")
    ones = int(number).bit_count()
    steps = [Step("n = n & n - 1; c = c + 1", "n, c") for _ in range(ones)]
    if steps:
        steps[0] = Step(f"n, c = {number}, 0; {steps[0].code}", "n, c")
        steps[-1] = Step(steps[-1].code, "c")
    return steps


@step_solvers.register("count_primes")
@grows_with("min_n", "max_n")
def count_primes(question: str, calls: int) -> list[Step]:
    """The range in equal parts, a call each."""
    low, high = (int(number) for number in found(_BETWEEN, question, "count_primes").split(" and "))
    parts = min(calls, (high - low + 1) // NUMBERS_A_CALL)
    ends = [low + (high - low + 1) * part // max(1, parts) for part in range(parts + 1)]
    steps = [Step(f"c = c + sum(map(prime, range({start}, {end})))", "c") for start, end in itertools.pairwise(ends)]
    return [Step(f"{_PRIME}c = 0\n{steps[0].code}", "c"), *steps[1:]] if steps else []


@step_solvers.register("leg_counting")
@grows_with("min_animals", "max_animals")
def leg_counting(question: str, calls: int) -> list[Step]:
    """One kind of animal a call; those without legs add nothing and are left out."""
    asked = question.rpartition("\n\n")[2]
    terms = []
    for entry in _ANIMALS.findall(asked):
        count, _, animal = entry.partition(" ")
        if legs := _legs(animal):
            terms.append(f"{count} * {legs}")
    return [Step(f"x = {term}" if at == 0 else f"x = x + {term}", "x") for at, term in enumerate(terms)]


@functools.cache
def _animals() -> dict[str, int]:
    from reasoning_gym.arithmetic.leg_counting import ANIMALS

    return {f"{animal}s": legs for animal, legs in ANIMALS.items()} | dict(ANIMALS)


def _legs(animal: str) -> int:
    known = _animals()
    if animal not in known:
        raise NoSolver(f"step solver 'leg_counting' does not know how many legs {animal!r} have")
    return known[animal]
