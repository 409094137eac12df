"""From `model.path` in the settings to `runs/NAME/model`, the folder that the learner and every engine load.

Invariant: the folder is complete or absent. It is written beside its place and moved there, so a killed run leaves no
half of one.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from toolrl.config import RunConfig
from toolrl.config_sequence_parallel import heads_of_model_problem
from toolrl.errors import ConfigError, UserError
from toolrl.registry import nearest

BUILT_IN = "tiny:"


class ModelNotFound(UserError):
    """`model.path` names no built-in model, no Hugging Face folder and no model that can be had."""


def run_folder(config: RunConfig) -> Path:
    return Path(config.runs_dir) / config.name


def prepare_model(config: RunConfig) -> Path:
    """The run's model folder, made from `model.path` unless it exists already (a resumed run keeps its own).

    A built-in model is written with weights from the run's seed; a folder's files are linked or copied; a hub name is
    taken from the local cache or downloaded.

    Raises:
        ModelNotFound: with what was looked for and what to give instead.
        ConfigError: the learner's ranks cannot share rows of this model.
    """
    target = run_folder(config) / "model"
    if not (target / "config.json").is_file():
        _make(target, config)
    if problem := heads_of_model_problem(config.learner.sequence_parallel, target):
        raise ConfigError([problem])
    return target


def _make(target: Path, config: RunConfig) -> None:
    path, template = config.model.path, config.model.chat_template
    source = None if path.startswith(BUILT_IN) else _local_folder(path)
    if template is not None and not Path(template).is_file():
        raise ModelNotFound(f"model.chat_template: there is no file {template}")
    partial = target.with_name("model.partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    if source is None:
        _write_built_in(path, partial, config.seed)
    else:
        _link_files(source, partial)
    if template is not None:
        shutil.copyfile(template, partial / "chat_template.jinja")
    shutil.rmtree(target, ignore_errors=True)
    partial.rename(target)


def _write_built_in(path: str, folder: Path, seed: int) -> None:
    from toolrl.app.tiny_model import NAME, write_tiny_model

    if path != NAME:
        raise ModelNotFound(f"model.path: no built-in model {path!r}{nearest(path, [NAME])}")
    write_tiny_model(folder, seed)


def _local_folder(path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelNotFound(f"model.path: {folder} has no config.json; give a folder in Hugging Face format")
        return folder
    if path.startswith((".", "/", "~")) or path.count("/") > 1:
        raise ModelNotFound(
            f"model.path: there is no folder {folder}; give a Hugging Face folder, a hub name or tiny:qwen3"
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(path, allow_patterns=["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.py"])
        )
    except Exception as error:  # the hub client has no common base for "offline", "unknown" and "not allowed"
        why = f"{type(error).__name__}: {error}"
        raise ModelNotFound(
            f"model.path: {path!r} is neither a folder here nor to be had from the hub ({why}); "
            "download it to a folder and give that, or use tiny:qwen3"
        ) from error


def _link_files(source: Path, target: Path) -> None:
    """Weights are linked, not copied; small files are copied, since a run may write its own template beside them."""
    for file in sorted(source.iterdir()):
        if not file.is_file():
            continue
        real = file.resolve()
        if file.suffix == ".safetensors":
            os.symlink(real, target / file.name)
        else:
            shutil.copyfile(real, target / file.name)


def make_folder(path: Path) -> None:
    """Makes the folder and its parents. Raises UserError where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(f"{path} is read-only")
    except OSError as error:
        raise UserError(f"runs_dir: {path} cannot be written ({error}); give another with --runs-dir") from error
