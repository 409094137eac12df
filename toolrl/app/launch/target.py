"""What every target has: its files from templates, and the commands that submit, follow and stop it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jinja2

import toolrl
from toolrl import presets
from toolrl.app.launch.nodes import groups, ray_flags
from toolrl.config import RunConfig
from toolrl.errors import UserError
from toolrl.registry import Registry

RUN_FILE = "run.yaml"
RAY_PORT = 6379
CONFIG_FOLDER = "/etc/toolrl"  # where containers find the run's settings


@dataclass(frozen=True)
class Rendered:
    """Files by name, and the commands, each run in their folder. `{id}` stands for what `submit` printed last."""

    files: dict[str, str]
    submit: list[str]
    follow: list[str] = field(default_factory=list)  # prints the logs until the run ends
    state: list[str] = field(default_factory=list)  # prints how it stands
    stop: list[str] = field(default_factory=list)
    exit_code: list[str] = field(default_factory=list)  # prints the run's exit code; empty: that of `follow`
    finish: list[str] = field(default_factory=list)  # takes away what a run that has ended leaves
    prepare: Callable[[Path], None] | None = None  # before the files are there: what this machine must have
    readers: tuple[int, int] | None = None  # user and group that the files are for, where that is not who launches


Target = Callable[[RunConfig], Rendered]
targets: Registry[Target] = Registry("launch target")


def render(config: RunConfig, target: str) -> Rendered:
    """The files of a target.

    Raises:
        UserError: an unknown target, or a cluster that does not hold the run.
    """
    from toolrl.app.launch import compose, kuberay, ray_job, slurm  # noqa: F401  they register themselves

    runs_are_shared(config)
    return targets.get(target)(config)


def runs_are_shared(config: RunConfig) -> None:
    """Every node reads the model from the run's folder, so it must lie on a mount. Raises UserError."""
    place = Path(config.runs_dir)
    if any(place.is_relative_to(mount.target) and not mount.read_only for mount in config.cluster.mounts):
        return
    raise UserError(
        f"runs_dir={config.runs_dir} lies on no mount that all nodes share; add one, e.g. "
        "cluster.mounts=[{target: /runs, source: /srv/toolrl/runs}] runs_dir=/runs"
    )


def run_file(config: RunConfig) -> str:
    """The settings of the run inside the cluster, which it joins where it finds it."""
    inside = replace(config, quiet=True, placement=replace(config.placement, ray_address="auto"))
    return presets.to_yaml(inside)


def filled(template: str, config: RunConfig, **values: Any) -> str:
    """A template of deploy/templates with the config, its groups and more values. A missing value is an error."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(templates()),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,  # YAML and shell: values go through `json` and `shell`
    )
    environment.filters["json"] = json.dumps
    environment.filters["shell"] = shlex.quote
    return environment.get_template(template).render(
        config=config,
        cluster=config.cluster,
        groups=groups(config),
        ray_flags=ray_flags,
        ray_port=RAY_PORT,
        run_file=RUN_FILE,
        config_folder=CONFIG_FOLDER,
        version=toolrl.__version__,
        **values,
    )


def templates() -> Path:
    """deploy/templates of a checkout, or where a wheel has put it. Raises UserError."""
    places = [Path(toolrl.__file__).parents[1] / "deploy", Path(sys.prefix) / "share" / "toolrl" / "deploy"]
    for place in places:
        if (place / "templates").is_dir():
            return place / "templates"
    raise UserError(f"the templates of deploy/ are neither in {places[0]} nor in {places[1]}; install toolrl again")
