"""In- and out-of-distribution side by side. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Key in `evaluation_table` -> how a table's head calls it.
MEASURES = {
    "accuracy": "accuracy",
    "tool_call_rate": "call rate",
    "calls_per_trajectory": "calls per episode",
    "format_validity": "healthy turns",
}


def ood_table(
    own: Mapping[str, Any], variants: Mapping[str, tuple[str, Mapping[str, Any]]], left_out: Mapping[str, str]
) -> dict[str, Any]:
    """What of the behaviour in distribution is left out of it.

    Args:
        own: `evaluation_table` of the run's own distribution.
        variants: name -> (what is otherwise, `evaluation_table` under it).
        left_out: name -> why it was not played.

    Returns:
        `{"in_distribution": {measure: value, tasks}, "variants": {name: {"what", "tasks", measure: {"value", "in_distribution",
        "difference"}, "by_family"}}, "left_out"}`. `by_family` is the variant's whole table of each family.
    """
    here = own["all"]
    return {
        "in_distribution": {"tasks": here["tasks"], **{measure: here[measure] for measure in MEASURES}},
        "variants": {
            name: {
                "what": what,
                "tasks": table["all"]["tasks"],
                **{measure: _beside(table["all"][measure], here[measure]) for measure in MEASURES},
                "all": dict(table["all"]),
                "by_family": dict(table["by_family"]),
            }
            for name, (what, table) in variants.items()
        },
        "left_out": dict(left_out),
    }


def _beside(value: float, own: float) -> dict[str, float]:
    return {"value": value, "in_distribution": own, "difference": value - own}
