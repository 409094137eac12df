"""Builds the sandbox image: on a slim Python base from a registry, or on a Debian root file system that needs none.

The base without a registry is made once by mmdebstrap from the package sources this machine uses and kept under
`toolrl-sandbox-base:debian`; the sandbox's own files are a thin layer on either base.
"""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sandbox.image import How
from sandbox.image.guard import MARKER_PATH, MARKER_TEXT

if TYPE_CHECKING:
    from docker import DockerClient

BASE_TAG = "toolrl-sandbox-base:debian"
SOURCE_LABEL = "toolrl.sandbox.source"
_PACKAGES = ("python3", "python3-numpy", "python3-sympy")
_PIP_PACKAGES = ("numpy", "sympy")
EXTRAS = {"matplotlib": "python3-matplotlib", "pandas": "python3-pandas", "scipy": "python3-scipy"}  # pip → Debian
_PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_INSIDE_IMAGE = ("guard.py", "erase.py", "warden.py")
_BASE_DEADLINE_S = 900


class BuildFailed(Exception):
    """The image could not be built; the message says what to do."""


def _files() -> dict[str, bytes]:
    """Path inside the image → content, of everything that is ours."""
    files = {"sbx/lib/sandbox/__init__.py": b"", "sbx/lib/sandbox/image/__init__.py": b""}
    for path in sorted((_PACKAGE_ROOT / "inside").glob("*.py")):
        files[f"sbx/lib/sandbox/inside/{path.name}"] = path.read_bytes()
    for name in _INSIDE_IMAGE:
        files[f"sbx/lib/sandbox/image/{name}"] = (_PACKAGE_ROOT / "image" / name).read_bytes()
    files["sbx/start.py"] = (_PACKAGE_ROOT / "image" / "start.py").read_bytes()
    files[MARKER_PATH.lstrip("/")] = MARKER_TEXT.encode()
    files["Dockerfile"] = (_PACKAGE_ROOT / "image" / "Dockerfile").read_bytes()
    return files


def source_hash() -> str:
    """Changes when anything that goes into the image changes; images carry it as a label."""
    digest = hashlib.sha256()
    for name, content in sorted(_files().items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _context() -> io.BytesIO:
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w") as archive:
        for name, content in _files().items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(content), 0o644
            archive.addfile(entry, io.BytesIO(content))
    context.seek(0)
    return context


def _apt_sources() -> list[str]:
    """The Debian source files of this machine for its own release; empty: mmdebstrap's default."""
    codename = _codename()
    found = []
    for path in [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]:
        if path.suffix in (".list", ".sources") and path.is_file():
            text = path.read_text(errors="replace")
            if codename in text and "/debian" in text:
                found.append(str(path))
    return found


def _codename() -> str:
    with open("/etc/os-release", encoding="utf-8") as release:
        fields = dict(line.rstrip().split("=", 1) for line in release if "=" in line)
    if fields.get("ID") != "debian":
        return "bookworm"
    return fields.get("VERSION_CODENAME", "bookworm").strip('"')


def _base_tag(extras: Sequence[str]) -> str:
    return "-".join([BASE_TAG, *extras])


def make_base(client: DockerClient, tag: str, packages: Sequence[str]) -> None:
    """A Debian root file system of the essential packages and `packages`, imported under `tag`. Raises BuildFailed."""
    if shutil.which("mmdebstrap") is None:
        raise BuildFailed("mmdebstrap is not installed: apt-get install mmdebstrap, or build on a base from a registry")
    with tempfile.TemporaryDirectory(prefix="toolrl-image-") as folder:
        root = os.path.join(folder, "root.tar")
        command = ["mmdebstrap", "--variant=essential", f"--include={','.join(packages)}"]
        command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("man", "doc", "locale", "info")]
        command += ['--aptopt=Apt::Install-Recommends "false"', _codename(), root, *_apt_sources()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_BASE_DEADLINE_S)
        if done.returncode != 0:
            raise BuildFailed(f"mmdebstrap failed ({done.returncode}): {done.stderr[-2000:]}")
        repository, _, version = tag.partition(":")
        client.api.import_image_from_file(root, repository=repository, tag=version)


def has_image(client: DockerClient, tag: str) -> bool:
    import docker.errors

    try:
        client.images.get(tag)
    except docker.errors.ImageNotFound:
        return False
    return True


def _build_on(client: DockerClient, tag: str, base: str | None, extras: Sequence[str]) -> str:
    import docker.errors

    arguments = {"SOURCE": source_hash(), "PACKAGES": " ".join([*_PIP_PACKAGES, *extras])}
    if base:
        arguments["BASE"] = base
    try:
        image, _ = client.images.build(
            fileobj=_context(),
            custom_context=True,
            tag=tag,
            buildargs=arguments,
            rm=True,
            forcerm=True,
            network_mode="none" if base else None,  # a base of ours has every package
        )
    except (docker.errors.BuildError, docker.errors.APIError) as error:
        raise BuildFailed(f"building {tag} on {base or 'the slim Python base'} failed: {error}") from error
    return str(image.id)


def build_image(tag: str, how: How, extras: Sequence[str] = ()) -> str:
    """Build under `tag`, return the image id. `auto`: on the registry-free base if it is here already, else on the slim
    Python base, else make the registry-free one. `extras`: packages of `EXTRAS` beside numpy and sympy. Raises
    BuildFailed, docker.errors.DockerException."""
    import docker

    if unknown := set(extras) - set(EXTRAS):
        raise BuildFailed(f"no package {', '.join(sorted(unknown))} to add; there are {', '.join(EXTRAS)}")
    extras = sorted(set(extras))
    base = _base_tag(extras)
    client = docker.from_env(timeout=600)
    try:
        if how == "debootstrap" or (how == "auto" and has_image(client, base)):
            if not has_image(client, base):
                make_base(client, base, [*_PACKAGES, *(EXTRAS[name] for name in extras)])
            return _build_on(client, tag, base, extras)
        try:
            return _build_on(client, tag, None, extras)
        except BuildFailed:
            if how == "dockerfile":
                raise
            make_base(client, base, [*_PACKAGES, *(EXTRAS[name] for name in extras)])
            return _build_on(client, tag, base, extras)
    finally:
        client.close()
