"""Writes what a target rendered into the run's launch folder, submits it, follows it, and remembers how to find it again.

`RUNS_DIR/launches/NAME/` holds the rendered files, Ray's token (readable by its owner only) and `launch.json`.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from toolrl.app.launch.target import Rendered
from toolrl.config import RunConfig
from toolrl.errors import UserError

FOLDER, RECORD, TOKEN = "launches", "launch.json", "ray-token"
_NAME_FILES = {"KUBECONFIG", "SLURM_CONF", "DOCKER_CONFIG", "DOCKER_CERT_PATH", "RAY_AUTH_TOKEN_PATH"}


@dataclass(frozen=True)
class Launch:
    """A submitted run: where its files lie, and what its scheduler calls it."""

    target: str
    id: str
    folder: str
    follow: list[str]
    state: list[str]
    stop: list[str]
    exit_code: list[str]
    finish: list[str] = field(default_factory=list)

    def command(self, words: Sequence[str]) -> list[str]:
        """With the id in its place."""
        return [word.replace("{id}", self.id) for word in words]


def write(rendered: Rendered, config: RunConfig, folder: Path) -> list[Path]:
    """The files, and a fresh token where the folder has none yet; what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / name for name in rendered.files]
    for path, text in zip(written, rendered.files.values(), strict=True):
        path.write_text(text)
    token = folder / TOKEN
    if config.cluster.auth == "token" and not token.exists():
        written.append(token)
        descriptor = os.open(token, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_hex(32))
    if rendered.readers is not None:
        for path in written:
            os.chown(path, *rendered.readers)
    return written


def submit(rendered: Rendered, config: RunConfig, target: str, folder: Path) -> Launch:
    """Writes, submits and remembers. Raises UserError where the machine lacks something or the scheduler refuses."""
    for secret in config.cluster.secrets:
        if target != "kuberay" and not os.environ.get(secret.variable):
            raise UserError(f"cluster.secrets: {secret.variable} is not set in the environment of `toolrl launch`")
    if rendered.prepare is not None:
        rendered.prepare(folder)
    write(rendered, config, folder)
    try:
        said = run(rendered.submit, folder)
    except UserError:
        if rendered.finish:
            run(rendered.finish, folder)
        raise
    launch = Launch(
        target=target,
        id=said.split()[-1].partition(";")[0] if said.split() else "",
        folder=str(folder.resolve()),
        follow=rendered.follow,
        state=rendered.state,
        stop=rendered.stop,
        exit_code=rendered.exit_code,
        finish=rendered.finish,
    )
    (folder / RECORD).write_text(json.dumps(asdict(launch), indent=1))
    return launch


def runs_here(config: RunConfig, target: str) -> Path:
    """Where the runs lie on the machine that launches: what Compose mounts is a folder of it."""
    runs = Path(config.runs_dir)
    for mount in config.cluster.mounts if target == "compose" else ():
        if runs.is_relative_to(mount.target):
            return Path(mount.source) / runs.relative_to(mount.target)
    return runs


def folder_of(config: RunConfig, target: str) -> Path:
    """Beside the run's own folder, which the run makes for itself."""
    return runs_here(config, target) / FOLDER / config.name


def with_free_name(config: RunConfig, target: str) -> RunConfig:
    """Under a name that neither a run nor a launch has."""
    number, free = 1, config
    while (runs_here(free, target) / free.name).exists() or (folder_of(free, target) / RECORD).exists():
        number += 1
        free = replace(config, name=f"{config.name}-{number}")
    return free


def launched(name: str, runs_dir: str | Path) -> Launch | None:
    """How a run was launched; None where it was started here."""
    record = Path(runs_dir) / FOLDER / name / RECORD
    return Launch(**json.loads(record.read_text())) if record.is_file() else None


def follow(launch: Launch) -> int:
    """Prints the run's log until it ends; its exit code."""
    try:
        words = resolved(launch.command(launch.follow))
        code = subprocess.run(words, cwd=launch.folder, env=_environment(), check=False).returncode
    except FileNotFoundError as error:
        raise UserError(f"{launch.target}: {error.filename} is not installed here") from None
    if not launch.exit_code:
        return code
    said = run(launch.command(launch.exit_code), Path(launch.folder)).strip()
    _by_one(launch, launch.finish)
    if not said.lstrip("-").isdigit():
        raise UserError(
            f"{launch.target} does not tell the run's exit code ({said or 'nothing'}); `toolrl status` says more"
        )
    return int(said)


def stop(launch: Launch) -> None:
    """Ends the run in order. Raises UserError."""
    _by_one(launch, launch.stop)


def _by_one(launch: Launch, words: Sequence[str]) -> None:
    """Who follows a run and who stops it would take the same things away at once."""
    if not words:
        return
    with (Path(launch.folder) / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run(launch.command(words), Path(launch.folder))


def resolved(words: Sequence[str]) -> list[str]:
    """Compose is a plug-in of Docker's client, or a program of its own. Raises UserError where it is neither."""
    if list(words[:2]) != ["docker", "compose"]:
        return list(words)
    plugin = ["docker", "compose", "version"]
    if shutil.which("docker") and subprocess.run(plugin, capture_output=True, check=False).returncode == 0:
        return list(words)
    if shutil.which("docker-compose"):
        return ["docker-compose", *words[2:]]
    raise UserError(
        "neither `docker compose` nor docker-compose is installed here: install Docker's plug-in for Compose, or "
        "apt-get install docker-compose; `--dry-run` renders the files"
    )


def _environment() -> dict[str, str]:
    """Ours, for a command that runs in the launch's folder: files that variables name from here are named from the root."""
    found = dict(os.environ)
    for name in _NAME_FILES & found.keys():
        found[name] = os.pathsep.join(os.path.abspath(path) for path in found[name].split(os.pathsep) if path)
    return found


def run(words: Sequence[str], folder: Path) -> str:
    """What a scheduler's command prints; its complaints go to ours. Raises UserError."""
    try:
        done = subprocess.run(
            resolved(words),
            cwd=folder,
            env=_environment(),
            check=False,
            stdout=subprocess.PIPE,
            text=True,
        )
    except FileNotFoundError as error:
        raise UserError(f"{words[0]} is not installed here ({error.strerror}); `--dry-run` renders the files") from None
    if done.returncode:
        sys.stderr.write(done.stdout)
        raise UserError(f"{' '.join(words)} failed with exit code {done.returncode}")
    return done.stdout
