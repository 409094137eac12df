"""The rules of a run: those of a preset that ships with toolrl, then the config's own. Imports no torch.

A preset is a YAML file in toolrl/presets/guards/ whose first line says what it is and whose `rules` are written as in the
config. A rule of the config that has a preset rule's name stands in its place.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from omegaconf import OmegaConf

import toolrl
from toolrl.config import GuardRuleConfig, RunConfig
from toolrl.config_schema import built, faults, normalized
from toolrl.errors import ConfigError, Problem
from toolrl.guards.rule import Rule
from toolrl.registered_names import stage
from toolrl.registry import nearest

_FOLDER = Path(toolrl.__file__).parent / "presets" / "guards"


def names() -> list[str]:
    """The presets that ship with toolrl."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def text(name: str) -> str:
    """A preset as it is written. Raises ConfigError for an unknown name."""
    if name not in names():
        raise ConfigError([Problem("guards.preset", f"unknown preset of guards{nearest(name, names())}", name)])
    return (_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")


def description(name: str) -> str:
    """The first comment line of a preset."""
    return text(name).partition("\n")[0].lstrip("# ").strip()


def preset_rules(name: str) -> list[GuardRuleConfig]:
    """The rules of a preset. Raises ConfigError for an unknown name or a file with a fault."""
    tree = OmegaConf.to_container(OmegaConf.create(text(name)), resolve=True)
    schema = list[GuardRuleConfig]
    rules = normalized(schema, tree["rules"] if isinstance(tree, dict) else tree)
    if found := [problem for _, problem in faults(schema, rules, ("guards", "rules"))]:
        raise ConfigError(found)
    read: list[GuardRuleConfig] = built(schema, rules)
    return read


def shipped_and_own(config: RunConfig) -> tuple[list[GuardRuleConfig], list[GuardRuleConfig]]:
    """(the preset's rules, the config's own) of a run; of the preset's those that no own rule replaces."""
    own = config.guards.rules
    replaced = {rule.name for rule in own}
    shipped = [] if config.guards.preset is None else preset_rules(config.guards.preset)
    return [rule for rule in shipped if rule.name not in replaced], list(own)


def rules(config: RunConfig) -> list[Rule]:
    """The rules that a run watches: those of its preset whose action can act in it, then its own."""
    shipped, own = shipped_and_own(config)
    able = [rule for rule in shipped if lacking(config, rule) is None]
    return [Rule(**{**asdict(each), "action": each.action}) for each in [*able, *own]]


def lacking(config: RunConfig, rule: GuardRuleConfig) -> tuple[str, str] | None:
    """(key below the rule, what to do) where the rule's action could not do anything in this run; None: it can."""
    action = rule.action.name
    if action == "llds" and config.learner.updates_per_batch < 2:
        return "action.name", "LLDS acts from a batch's second update on; set learner.updates_per_batch=2 or more"
    if action == "roll_back" and config.loop.checkpoint_every_steps == 0:
        return "action.name", "there is no checkpoint to go back to; set loop.checkpoint_every_steps"
    component = str(rule.action.options.get("component", "interaction"))
    if action == "interaction_weight" and component not in [part.name for part in config.rewards.components]:
        told = f"add {component} to rewards.components, with rewards.weights.{component}=0 to begin with"
        return "action.options.component", f"there is no reward {component} to give weight to; {told}"
    if action == "interaction_weight" and stage(component) != "group":
        told = (
            "only the weight of a reward that needs the whole group (interaction, call_validity, …) can change in a run"
        )
        return "action.options.component", f"{component} is scored where its episode runs; {told}"
    return None
