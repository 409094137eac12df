"""Builds `toolrl:cpu` by deploy/docker/cpu.Dockerfile, with or without an image registry.

Where a registry answers, on the Dockerfile's own base and from pip's usual index. Where none does, on a Debian root file system
made by mmdebstrap, from wheels that this machine's pip has fetched and serves to the build over the loopback. Base and wheels
are kept for the next time: as image `toolrl-cpu-base:debian`, and in build/cpu-image/.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import subprocess
import sys
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import docker

from sandbox.image.builder import has_image, make_base

IMAGE, BASE = "toolrl:cpu", "toolrl-cpu-base:debian"
ROOT = Path(__file__).parents[1]
DOCKERFILE, PINNED = ROOT / "deploy" / "docker" / "cpu.Dockerfile", ROOT / "requirements" / "cpu.txt"
CACHE = ROOT / "build" / "cpu-image"
PACKAGES = ("python3", "python3-venv", "python3-dev", "g++", "libnuma1", "bubblewrap", "procps", "ca-certificates")
WHEELS_PORT = 8931  # always the same: it stands in the build's arguments, by which its layers are found again
PULL_DEADLINE_S, WHEELS_DEADLINE_S, BUILD_DEADLINE_S = 300, 1800, 3600


def build() -> None:
    """Raises CalledProcessError, TimeoutExpired, sandbox.image.builder.BuildFailed."""
    command = ["docker", "build", "--file", str(DOCKERFILE), "--tag", IMAGE]
    if _registry_answers():
        _build(command)
        return
    client = docker.from_env(timeout=600)
    try:
        if not has_image(client, BASE):
            print(f"no registry answers: making {BASE}", flush=True)
            make_base(client, BASE, PACKAGES)
    finally:
        client.close()
    handler = functools.partial(_Quiet, directory=str(wheels()))
    with ThreadingHTTPServer(("127.0.0.1", WHEELS_PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command += ["--network", "host", "--build-arg", f"BASE={BASE}", "--build-arg", "PIP_NO_INDEX=1"]
        _build([*command, "--build-arg", f"PIP_FIND_LINKS=http://127.0.0.1:{WHEELS_PORT}/"])
        server.shutdown()


def wheels() -> Path:
    """A folder with a wheel of everything that is pinned, and of torch with what it needs."""
    folder = CACHE / hashlib.sha256(PINNED.read_bytes()).hexdigest()[:16]
    ready = folder / "ready"
    if not ready.exists():
        print(f"fetching wheels into {folder}", flush=True)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--wheel-dir", str(folder)]
        torch = re.search(r"torch==[\w.]+", DOCKERFILE.read_text())
        assert torch is not None, f"{DOCKERFILE} installs no torch"
        for what in ([torch.group()], ["--no-deps", "--requirement", str(PINNED)]):
            subprocess.run([*pip, *what], check=True, timeout=WHEELS_DEADLINE_S)
        ready.touch()
    return folder


def size_gb() -> float:
    """Of the image, in GB (10⁹ bytes)."""
    words = ["docker", "image", "inspect", "--format={{.Size}}", IMAGE]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout) / 1e9


def _registry_answers() -> bool:
    base = re.search(r"^ARG BASE=(\S+)", DOCKERFILE.read_text(), re.MULTILINE)
    assert base is not None, f"{DOCKERFILE} names no base"
    try:
        done = subprocess.run(
            ["docker", "pull", base.group(1)], capture_output=True, timeout=PULL_DEADLINE_S, check=False
        )
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def _build(command: list[str]) -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    log = CACHE / "build.log"
    with log.open("wb") as file:
        words = [*command, str(ROOT)]
        done = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, timeout=BUILD_DEADLINE_S, check=False)
    if done.returncode:
        sys.stderr.write(log.read_text(errors="replace")[-4000:])
        raise subprocess.CalledProcessError(done.returncode, command)


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


if __name__ == "__main__":
    os.umask(0o022)
    build()
    print(f"{IMAGE}: {size_gb():.2f} GB")
