"""The command line of a local box, and whether bubblewrap can confine it here."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from sandbox.config import SandboxConfig
from sandbox.process.main import CONFINED_PARENT, EPISODE
from sandbox.result import SandboxUnavailable

_PACKAGE = Path(__file__).resolve().parent.parent
_LIBRARY = "/sbx/lib"
_ENVIRONMENT = {
    "PATH": "/usr/local/bin:/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
    "MPLBACKEND": "Agg",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Confinement:
    """Whether bubblewrap works on this machine, and what that means."""

    bubblewrap: bool
    why: str


def _bwrap_base() -> list[str]:
    """Own namespaces. Root keeps the host's user namespace, so that each box can have a real uid of its own to count
    by."""
    command = ["bwrap", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--as-pid-1", "--new-session", "--clearenv", "--cap-drop", "ALL"]
    if os.getuid() == 0:
        return [*command, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    return [*command, "--unshare-user"]


def confinement(config: SandboxConfig) -> Confinement:
    """What confines the boxes of this config here. Blocking, some milliseconds. Raises SandboxUnavailable."""
    if config.confinement == "none":
        return Confinement(False, "a plain subprocess, as configured: no security boundary")
    found = bubblewrap()
    if config.confinement == "bubblewrap" and not found.bubblewrap:
        raise SandboxUnavailable(f"confinement=bubblewrap cannot be had: {found.why}")
    return found


@functools.cache
def bubblewrap() -> Confinement:
    """Try bubblewrap once."""
    if shutil.which("bwrap") is None:
        return Confinement(False, "bubblewrap is not installed (apt-get install bubblewrap)")
    probe = [*_bwrap_base(), "--ro-bind", "/", "/", "--proc", "/proc", "--dev", "/dev", "--", "/bin/true"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Confinement(False, f"bubblewrap cannot run: {error}")
    if done.returncode != 0:
        return Confinement(False, f"bubblewrap does not work here: {done.stderr.strip()}")
    return Confinement(True, "bubblewrap confines each box: own mounts, pids, network, IPC; no cgroup limits")


def _prefixes() -> list[str]:
    """Where this Python and its environment are, beside the system's folders."""
    return [prefix for prefix in dict.fromkeys((sys.base_prefix, sys.prefix)) if not f"{prefix}/".startswith("/usr/")]


def _placed(path: str) -> str:
    """Where a path of this Python is inside a box: where it is outside, but for those in the host's /tmp, which a box has of
    its own."""
    return f"/sbx/host{path}" if path.startswith("/tmp/") else path


def _parents() -> list[str]:
    """The folders above them, outermost first."""
    places = [Path(_placed(prefix)) for prefix in _prefixes()]
    return [str(parent) for place in places for parent in reversed(place.parents) if str(parent) != "/"]


def _system_binds() -> list[str]:
    """Read-only: the system's libraries, this Python and its environment; nothing of anybody's home."""
    # bubblewrap would make the parents of a private folder private too; the box's own uid has to pass through.
    binds = [word for path in ("/sbx", _LIBRARY, *_parents()) for word in ("--perms", "0755", "--dir", path)]
    binds += ["--ro-bind", "/usr", "/usr"]
    for path in ("/bin", "/sbin", "/lib", "/lib64", "/lib32"):
        if os.path.islink(path):
            binds += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            binds += ["--ro-bind", path, path]
    for path in ("/etc/ld.so.cache", "/etc/localtime", "/etc/alternatives"):
        binds += ["--ro-bind-try", path, path]
    for prefix in _prefixes():
        binds += ["--ro-bind", prefix, _placed(prefix)]
    for part in ("__init__.py", "inside", "process"):
        binds += ["--ro-bind", str(_PACKAGE / part), f"{_LIBRARY}/sandbox/{part}"]
    return binds


def _start(python: str, library: str) -> list[str]:
    code = f"import sys; sys.path.insert(0, {library!r}); from sandbox.process.main import main; main()"
    return [python, "-s", "-P", "-B", "-c", code]


def confined_command(config: SandboxConfig, info_fd: int) -> list[str]:
    """bubblewrap around the first process of a box; the pid of the latter is written to `info_fd`."""
    episode = f"{CONFINED_PARENT}/{EPISODE}"
    command = [*_bwrap_base(), "--info-fd", str(info_fd), "--hostname", "sandbox", *_system_binds()]
    command += ["--proc", "/proc", "--dev", "/dev"]
    for path, size_mib in ((CONFINED_PARENT, config.work_mib + config.tmp_mib), ("/dev/shm", config.tmp_mib)):
        command += ["--perms", "1777", "--size", str(size_mib * 2**20), "--tmpfs", path]
    command += ["--symlink", f"{episode}/tmp", "/tmp", "--remount-ro", "/", "--chdir", "/"]
    for name, value in _ENVIRONMENT.items():
        command += ["--setenv", name, value]
    return [*command, "--", *_start(_placed(sys.executable), _LIBRARY)]


def plain_command() -> tuple[list[str], dict[str, str]]:
    """The first process of a box without bubblewrap, and its environment."""
    return _start(sys.executable, str(_PACKAGE.parent)), dict(_ENVIRONMENT)
