"""`harder_ranges`: the task families' ranges lie beyond those that were trained on.

Has the policy learnt a procedure, or the answers of small cases? For each family the rules say which of its ranges move:
their new lowest value is above the old highest, so that no question could have come from the run's own settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from toolrl.config import FamilyConfig, RunConfig
from toolrl.errors import UserError
from toolrl.registry import nearest
from toolrl.variants.variant import NotApplicable, Varied, variants


@dataclass(frozen=True)
class Beyond:
    """The options `low` and `high` of a family move to high + 1 … high + `by`, or … high × `times` with it."""

    low: str
    high: str
    by: int = 2
    times: int = 0

    def moved(self, options: Mapping[str, Any]) -> dict[str, int]:
        old = int(options[self.high])
        return {self.low: old + 1, self.high: old * self.times if self.times else old + self.by}


RULES: dict[str, tuple[Beyond, ...]] = {
    "base_conversion": (Beyond("min_value", "max_value", times=10),),
    "basic_arithmetic": (Beyond("min_terms", "max_terms"),),
    "chain_sum": (Beyond("min_digits", "max_digits", by=1), Beyond("min_terms", "max_terms", by=1)),
    "count_bits": (Beyond("min_n", "max_n", times=256),),
    "count_primes": (Beyond("min_n", "max_n", times=4),),
    "decimal_chain_sum": (Beyond("min_digits", "max_digits", by=1), Beyond("min_terms", "max_terms", by=1)),
    "fraction_simplification": (Beyond("min_value", "max_value", times=10),),
    "gcd": (Beyond("min_value", "max_value", times=10),),
    "lcm": (Beyond("min_value", "max_value", times=10),),
    "leg_counting": (Beyond("min_instances", "max_instances", times=4),),
    "letter_counting": (Beyond("min_words", "max_words", by=10),),
    "prime_factorization": (Beyond("min_value", "max_value", times=10),),
    "products": (Beyond("min_digits", "max_digits", by=1),),
    "simple_equations": (Beyond("min_value", "max_value", times=10),),
}


@variants.register("harder_ranges")
def harder_ranges(config: RunConfig, *, ranges: Mapping[str, Mapping[str, Any]] | None = None) -> Varied:
    """Options: `ranges`, {family: {option: value}}, in the place of a family's rule or for one that has none."""
    if config.tasks.kind != "reasoning_gym":
        raise NotApplicable(f"tasks.kind={config.tasks.kind} has no ranges; only reasoning_gym's families do")
    given = dict(ranges or {})
    names = [family.name for family in config.tasks.families]
    for name in given:
        if name not in names:
            raise UserError(f"harder_ranges: the run has no task family {name!r}{nearest(name, names)}")
    if missing := [name for name in names if name not in RULES and name not in given]:
        raise NotApplicable(
            f"no rule for {', '.join(missing)}; give ranges: eval.ood=[…, {{name: harder_ranges, options: {{ranges: "
            f"{{{missing[0]}: {{OPTION: VALUE}}}}}}}}]"
        )
    families = [_harder(family, given.get(family.name)) for family in config.tasks.families]
    what = "; ".join(
        f"{new.name} {', '.join(f'{key} {value}' for key, value in new.options.items() if old.options.get(key) != value)}"
        for old, new in zip(config.tasks.families, families, strict=True)
    )
    return Varied(replace(config, tasks=replace(config.tasks, families=families)), what)


def _harder(family: FamilyConfig, given: Mapping[str, Any] | None) -> FamilyConfig:
    if given is not None:
        return replace(family, options={**family.options, **given})
    options = {**_defaults(family.name), **family.options}
    moved = {key: value for rule in RULES[family.name] for key, value in rule.moved(options).items()}
    return replace(family, options={**family.options, **moved})


def _defaults(family: str) -> dict[str, Any]:
    """A family's own options; reasoning_gym takes a second to load."""
    from toolrl.tasks.reasoning_gym import known_families

    return {field.name: field.default for field in dataclasses.fields(known_families()[family])}
