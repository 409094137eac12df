"""`renamed_tools`: the tools and their arguments have other names, wherever the policy reads or writes them.

Does the policy read which tools there are, or has it learnt a name by heart?
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from toolrl.config import RunConfig, TaskConfig, ToolConfig
from toolrl.errors import UserError
from toolrl.tasks.reworded import in_other_words
from toolrl.variants.variant import NotApplicable, Varied, variants

# Names of the tools that come with toolrl, as `ToolConfig.rename` takes them.
NAMES = {
    "python": "run_code",
    "python.code": "source",
    "calculator": "compute",
    "calculator.expression": "formula",
    "search": "look_up",
    "search.query": "words",
}
# These write code without naming a tool or an argument.
NAMELESS_FORMATS = ("fenced", "tagged")


@variants.register("renamed_tools")
def renamed_tools(config: RunConfig, *, names: Mapping[str, str] | None = None) -> Varied:
    """Options: `names`, {tool: name, tool.argument: name}, for tools of your own or other names than `NAMES`."""
    if not config.tools:
        raise NotApplicable("there are no tools (tools is empty)")
    if config.rollout.parser in NAMELESS_FORMATS:
        raise NotApplicable(f"the format {config.rollout.parser!r} names neither tool nor argument in a call")
    others = [tool.name for tool in config.tools if tool.name not in NAMES]
    if len(others) > 1 or (others and not names):
        raise NotApplicable(
            f"{', '.join(others)} make tools with names of their own; for one such entry of tools new ones can be given: "
            "eval.ood=[…, {name: renamed_tools, options: {names: {tool: name, tool.argument: name}}}]"
        )
    tools = [_renamed(tool, {**NAMES, **(names or {})}) for tool in config.tools]
    changed = {
        tool.rename.get(old, old): new for tool, made in _pairs(config, tools) for old, new in made.rename.items()
    }
    shown = [new for old, new in changed.items() if "." not in old]
    if shared := [name for name in shown if shown.count(name) > 1]:
        raise UserError(f"renamed_tools: two tools would be called {shared[0]!r}; give other names")
    what = ", ".join(f"{old} → {new}" for old, new in changed.items())
    mentioned = {old: new for old, new in changed.items() if "." not in old}
    return Varied(replace(config, tools=tools, tasks=_in_prompts(config.tasks, mentioned)), what)


def _pairs(config: RunConfig, tools: list[ToolConfig]) -> Iterator[tuple[ToolConfig, ToolConfig]]:
    return zip(config.tools, tools, strict=True)


def _renamed(tool: ToolConfig, known: Mapping[str, str]) -> ToolConfig:
    """One entry of `tools`. What the run itself renames is renamed again; an entry of unknown tools takes all other names."""
    if tool.name in NAMES:
        wanted = {old: new for old, new in known.items() if old.partition(".")[0] == tool.name}
    else:
        wanted = {old: new for old, new in known.items() if old.partition(".")[0] not in NAMES}
    return replace(tool, rename={**tool.rename, **wanted})


def _in_prompts(tasks: TaskConfig, names: Mapping[str, str]) -> TaskConfig:
    """The tasks with every tool that a system prompt mentions under its new name; rows may bring system prompts of their
    own. `Python`, the language, stays, and so do questions."""
    said = {in_other_words(old, names): in_other_words(new, names) for old, new in tasks.wording.system.items()}
    if tasks.kind != "reasoning_gym":
        said = {**names, **said}
    wording = replace(tasks.wording, system=said)
    return replace(tasks, system_prompt=in_other_words(tasks.system_prompt, names), wording=wording)
