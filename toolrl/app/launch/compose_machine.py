"""What the machine that a Compose cluster runs on must have: processors, folders that the nodes may write, a free name."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Sequence
from pathlib import Path

from toolrl.config import RunConfig
from toolrl.config_cluster import GroupConfig
from toolrl.errors import UserError

EXIT_CODE, VARIABLES = "exit-code", ".env"
DOCKER_SOCKET = Path("/var/run/docker.sock")
IMAGE_USER = (1000, 1000)  # of deploy/docker


def prepare(config: RunConfig, groups: Sequence[GroupConfig], containers: Sequence[str], folder: Path) -> None:
    """Looks, makes the folders, and writes into `folder` what the Compose file takes from this machine.

    Args:
        containers: the command that prints the containers of a cluster of this name.

    Raises:
        UserError: says what is missing.
    """
    processors_suffice(groups, int(_docker("docker", "info", "--format={{.NCPU}}")))
    if there := _docker(*containers).split():
        raise UserError(
            f"a Compose cluster {config.name} is there already ({', '.join(there)}): `toolrl stop {config.name}` ends it; "
            "or choose another name=…"
        )
    user = node_user()
    for mount in config.cluster.mounts:
        make_mount(Path(mount.source), user, writable=not mount.read_only)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / EXIT_CODE).unlink(missing_ok=True)
    variables = {"TOOLRL_USER": f"{user[0]}:{user[1]}"}
    if any(group.name == "sandbox" for group in groups):
        variables["DOCKER_GID"] = str(_socket_group())
    (folder / VARIABLES).write_text("".join(f"{name}={value}\n" for name, value in variables.items()))


def processors_suffice(groups: Sequence[GroupConfig], there: int) -> None:
    """Docker refuses a container that may use more processors than there are. Raises UserError."""
    if large := [f"{group.name} asks for {group.cpus}" for group in groups if group.cpus > there]:
        raise UserError(
            f"a node cannot have more processors than this machine's {there}: {', '.join(large)}. Nodes may share them: "
            f"describe the nodes with fewer, e.g. cluster.groups=[{{name: head, cpus: {min(there, 2)}, memory_gib: 4}}, …]"
        )


def node_user() -> tuple[int, int]:
    """User and group that the nodes run as: who launches, so that the run's files are theirs; never root."""
    return (os.getuid(), os.getgid()) if os.getuid() else IMAGE_USER


def make_mount(source: Path, user: tuple[int, int], *, writable: bool) -> None:
    """Makes the folder if it is missing: Docker would make it root's. Raises UserError where nodes cannot write."""
    uid, gid = user
    if not source.exists():
        try:
            source.mkdir(parents=True)
            os.chown(source, uid, gid)
        except OSError as error:
            raise UserError(f"cluster.mounts: {source} is not there and cannot be made ({error.strerror})") from None
    found = source.stat()
    bits = stat.S_IWOTH | stat.S_IXOTH
    if found.st_uid == uid:
        bits = stat.S_IWUSR | stat.S_IXUSR
    elif found.st_gid == gid:
        bits = stat.S_IWGRP | stat.S_IXGRP
    if writable and found.st_mode & bits != bits:
        raise UserError(
            f"cluster.mounts: the nodes run as user {uid}, which may not write {source}: chown {uid}:{gid} {source}"
        )


def _socket_group() -> int:
    try:
        return DOCKER_SOCKET.stat().st_gid
    except OSError:
        raise UserError(
            f"there is no {DOCKER_SOCKET}: the sandbox nodes make their boxes through it; start dockerd, or set "
            "placement.sandbox=local"
        ) from None


def _docker(*words: str) -> str:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise UserError("docker is not installed here; `--dry-run` renders the files") from None
    if done.returncode:
        raise UserError(f"the Docker engine does not answer: {done.stderr.strip() or 'nothing'}; start dockerd")
    return done.stdout
