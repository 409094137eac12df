"""A stored trajectory as a person reads it: turn by turn, what the policy wrote, what it was shown, what it earned."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from toolrl.supervision.guidance import guided_by
from toolrl.trajectory import Outcome, ToolResult, Trajectory, Turn, staleness

_OUTCOME_STYLE = {Outcome.ANSWERED: "green", Outcome.NO_ANSWER: "yellow", None: "yellow"}


def trajectory_text(
    trajectory: Trajectory, *, learner_version: int | None = None, decode: Callable[[Sequence[int]], str] | None = None
) -> Group:
    """Prompt, turns and result.

    Args:
        learner_version: of the weights that were trained on it; staleness is counted from it.
        decode: the run's tokenizer, for the prompt; without it the prompt's length is told.
    """
    parts: list[RenderableType] = [_head(trajectory, learner_version), _prompt(trajectory, decode)]
    number = 0
    for turn in trajectory.turns:
        if turn.kind == "policy":
            number += 1
            parts.append(_policy_panel(turn, number))
        else:
            parts.append(_tool_panel(turn))
    return Group(*parts, _foot(trajectory), Text())


def _head(t: Trajectory, learner_version: int | None) -> Text:
    head = Text(f"{t.id}", style="bold")
    family = t.metadata.get("family")
    head.append(f"  task {t.task_id}{f' ({family})' if family else ''}, sample {t.sample_index}", style="default")
    if t.oldest_version is not None:
        age = f", staleness {staleness(t, learner_version)}" if learner_version is not None else ""
        head.append(f"  weights {_versions(t)}{age}", style="dim")
    if (guide := guided_by(t)) is not None:
        head.append({"reference": "  a reference, not sampled", "hint": "  sampled after a hint"}[guide], style="dim")
    return head


def _versions(t: Trajectory) -> str:
    versions = sorted(t.versions)
    return "v" + (f"{versions[0]}" if len(versions) == 1 else f"{versions[0]}–{versions[-1]}")


def _prompt(t: Trajectory, decode: Callable[[Sequence[int]], str] | None) -> Panel:
    body = decode(t.prompt_ids) if decode is not None else "(the run's tokenizer is not at hand)"
    return _panel(Text(body.strip(), style="dim"), f"prompt, {len(t.prompt_ids)} tokens", "dim")


def _policy_panel(turn: Turn, number: int) -> Panel:
    facts = [f"policy, turn {number}", f"{len(turn.token_ids)} tokens"]
    if turn.logprobs:
        facts.append(f"mean log-probability {statistics.fmean(turn.logprobs):.3f}")
    if turn.finish_reason != "stop":
        facts.append(f"ended by {turn.finish_reason}")
    facts += [f"{name} {value:+g}" for name, value in turn.rewards.items() if value]
    body = Text(turn.text or "(nothing)", style="default" if turn.text else "dim")
    for error in turn.call_errors:
        body.append(f"\n✗ {error.kind}: {error.message}", style="red")
    return _panel(body, ", ".join(facts), "red" if turn.call_errors else "cyan")


_FINE = ("ok", "pending")


def _tool_panel(turn: Turn) -> Panel:
    failed = any(result.status not in _FINE for result in turn.results)
    body = (
        Text("\n").join(_result(result) for result in turn.results)
        if turn.results
        else Text("(no result)", style="dim")
    )
    return _panel(body, f"shown, {len(turn.token_ids)} tokens", "yellow" if failed else "green")


def _result(result: ToolResult) -> Text:
    facts = f"{result.name} → {result.status}, {result.wall_s * 1000:.0f} ms"
    facts += f" + {result.queue_s * 1000:.0f} ms waiting" if result.queue_s >= 0.001 else ""
    facts += ", truncated" if result.truncated else ""
    text = Text(facts, style="green" if result.status in _FINE else "yellow")
    return text.append(f"\n{result.text.rstrip()}" if result.text.strip() else "\n(no output)", style="default")


def _foot(t: Trajectory) -> Text:
    foot = Text("  outcome ")
    foot.append(str(t.outcome or "unfinished"), style=_OUTCOME_STYLE.get(t.outcome, "red"))
    if t.limit:
        foot.append(f" (limit: {t.limit})")
    foot.append(f"  answer {t.answer!r}")
    if "ground_truth" in t.metadata:
        foot.append(f" (right: {t.metadata['ground_truth']!r})")
    named = ", ".join(f"{name} {value:+g}" for name, value in t.rewards.items())
    turns = sum(t.turn_rewards)
    parts = ", ".join(part for part in (named, f"turns {turns:+g}" if turns else "") if part)
    foot.append(f"  reward {t.reward:+.3f}", style="bold").append(f" ({parts})" if parts else "")
    return foot


def _panel(body: Text, title: str, colour: str) -> Panel:
    return Panel(body, title=Text(title, style=colour), title_align="left", border_style=colour, padding=(0, 1))
