"""Euclid's algorithm and prime factors, a step a call."""

from __future__ import annotations

import math
import re

from toolrl.app.step_solvers.arithmetic import found
from toolrl.app.step_solvers.steps import Step, grows_with, step_solvers

_LIST = re.compile(r"\d+(?:, \d+)+")
_FACTORED = re.compile(r"(?<=factorization of )\d+|(?<=as their product )\d+")


@step_solvers.register("gcd")
@grows_with("min_numbers", "max_numbers", "min_value", "max_value")
def gcd(question: str, calls: int) -> list[Step]:
    """Euclid: a, b → b, a mod b until b is 0, then with the next number."""
    first, *others = found(_LIST, question, "gcd").split(", ")
    steps, a, begin = [], int(first), first
    for other in others:
        walked, a = _euclid(f"a, b = {begin}, {other}", a, int(other))
        steps += walked
        begin = "a"
    return [*steps[:-1], Step(steps[-1].code, "a")] if steps else []


@step_solvers.register("lcm")
@grows_with("min_numbers", "max_numbers", "min_value", "max_value")
def lcm(question: str, calls: int) -> list[Step]:
    """Euclid for the divisor that the multiple so far and the next number share; then the multiple of both. A number that
    divides the multiple so far adds nothing and is left out."""
    first, *others = found(_LIST, question, "lcm").split(", ")
    steps, x, take = [], int(first), f"x = {first}; "
    for other in others:
        if x % int(other) == 0:
            continue
        walked, divisor = _euclid(f"{take}n = {other}; a, b = x, n", x, int(other))
        steps += [*walked, Step("x = x * n // a", "x")]
        x = x * int(other) // divisor
        take = ""
    return steps


@step_solvers.register("prime_factorization")
@grows_with("min_value", "max_value")
def prime_factorization(question: str, calls: int) -> list[Step]:
    """The smallest factor is looked for, then divided out and noted as often as it goes, a call each; then the next."""
    number = found(_FACTORED, question, "prime_factorization")
    left, steps, take = int(number), [], f"n = {number}; f = []; "
    while left > 1:
        smallest = next((d for d in range(2, math.isqrt(left) + 1) if left % d == 0), left)
        steps.append(Step(f"{take}p = next((d for d in range(2, int(n ** 0.5) + 1) if n % d == 0), n)", "p"))
        while left % smallest == 0:
            left //= smallest
            steps.append(Step("f = f + [p]; n = n // p", "n, n % p" if left > 1 else "' × '.join(map(str, f))"))
        take = ""
    return steps


def _euclid(begin: str, a: int, b: int) -> tuple[list[Step], int]:
    """The steps from `begin`, which sets a and b, to b = 0; and the a that is left."""
    steps = []
    while b:
        a, b = b, a % b
        steps.append(Step(f"{begin}; a, b = b, a % b" if begin else "a, b = b, a % b", "a, b"))
        begin = ""
    return steps, a
