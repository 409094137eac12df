"""Which backend this machine can run, and why. Blocking: call it from a thread where there is an event loop."""

from __future__ import annotations

import logging

from sandbox.backend import Backend
from sandbox.config import SandboxConfig
from sandbox.process.launch import confinement
from sandbox.result import SandboxUnavailable

logger = logging.getLogger(__name__)


def docker_problem(config: SandboxConfig) -> str | None:
    """Why the Docker backend cannot be used, or None."""
    from docker.errors import ImageNotFound

    from sandbox.docker_backend import ENGINE_ERRORS, connect, engine_address
    from sandbox.image.builder import SOURCE_LABEL, source_hash

    try:
        engine_address()
        api = connect(timeout_s=10)
    except SandboxUnavailable as error:
        return str(error)
    try:
        image = api.inspect_image(config.image)  # type: ignore[no-untyped-call]
        if config.runtime not in api.info().get("Runtimes", {}):
            return f"the engine has no runtime {config.runtime!r}"
    except ImageNotFound:
        return f"the engine has no image {config.image}: build it with `python -m sandbox.image --tag {config.image}`"
    except ENGINE_ERRORS as error:
        return f"the Docker engine does not answer: {error}"
    finally:
        api.close()
    built_from = (image.get("Config", {}).get("Labels") or {}).get(SOURCE_LABEL)
    if built_from != source_hash():
        return (
            f"the image {config.image} was built from other sources: run `python -m sandbox.image --tag {config.image}`"
        )
    return None


def available_backend(config: SandboxConfig | None = None) -> tuple[str, str]:
    """(backend, why) that a pool with this config would use. Raises SandboxUnavailable where the one it asks for
    cannot be had."""
    config = config or SandboxConfig()
    if config.backend in ("auto", "docker"):
        problem = docker_problem(config)
        if problem is None:
            return "docker", f"an engine answers and has {config.image} (runtime {config.runtime})"
        if config.backend == "docker":
            raise SandboxUnavailable(problem)
        return "process", f"{confinement(config).why}; no Docker: {problem}"
    return "process", confinement(config).why


def make_backend(config: SandboxConfig) -> tuple[Backend, str]:
    """The backend and why it was chosen. Raises SandboxUnavailable."""
    name, why = available_backend(config)
    if name == "docker":
        from sandbox.docker_backend import DockerBackend

        return DockerBackend(config), why
    from sandbox.process.backend import ProcessBackend

    if not confinement(config).bubblewrap:
        logger.warning("the sandbox is a plain subprocess: NO security boundary. %s", why)
    return ProcessBackend(config), why
