"""What the sandbox is compared with: the limit, a bare echo over the same stream; and the usual ways to run a cell."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time

from sandbox.config import SandboxConfig
from sandbox.docker_backend import DockerBackend, engine_address

_ECHOED = b"x" * 200
_MUX_BYTES = 8  # what the engine puts before each piece of output

_JUPYTER = """
import json, sys, time
from jupyter_client.manager import start_new_kernel
rounds = int(sys.argv[1])
manager, client = start_new_kernel(kernel_name="python3", startup_timeout=60)
times = []
try:
    for number in range(rounds + 20):
        started = time.perf_counter()
        reply = client.execute_interactive(sys.argv[2], output_hook=lambda message: None, timeout=20)
        assert reply["content"]["status"] == "ok"
        if number >= 20:
            times.append(time.perf_counter() - started)
finally:
    client.stop_channels()
    manager.shutdown_kernel(now=True)
print(json.dumps(times))
"""


async def container_echo(config: SandboxConfig, rounds: int) -> tuple[list[float], list[float]]:
    """Seconds of echoes by `cat` in the same kind of container: of 200 bytes with a blocking socket, and of a frame with
    our channel."""
    backend = DockerBackend(config)
    name = await backend.call(backend.make, ["cat"])
    try:
        channel = await backend.attach(name)
        await backend.call(backend.start, name)
        framed = []
        for number in range(rounds + 20):
            started = time.perf_counter()
            await channel.request({"op": "echo"}, b"1 + 1", deadline_s=10)
            if number >= 20:
                framed.append(time.perf_counter() - started)
        channel.close()
    finally:
        await backend.remove(name)
    name = await backend.call(backend.make, ["cat"])
    try:
        bare = await backend.call(_bare_echo, backend, name, rounds)
    finally:
        await backend.remove(name)
        await backend.close()
    return bare, framed


async def container_starts(config: SandboxConfig, rounds: int) -> list[float]:
    """Seconds until the engine has made and started `cat` in the same kind of container."""
    backend = DockerBackend(config)
    times = []
    try:
        for _ in range(rounds):
            started = time.perf_counter()
            name = await backend.call(backend.make, ["cat"])
            try:
                await backend.call(backend.start, name)
                times.append(time.perf_counter() - started)
            finally:
                await backend.remove(name)
    finally:
        await backend.close()
    return times


def _bare_echo(backend: DockerBackend, name: str, rounds: int) -> list[float]:
    """Blocking."""
    kind, address = engine_address()
    if kind == "unix":
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(address)
    else:
        host, _, port = address.rpartition(":")
        stream = socket.create_connection((host, int(port)))
    with stream:
        stream.settimeout(20)
        stream.sendall(backend.attach_request(name))
        answer = b""
        while b"\r\n\r\n" not in answer:
            answer += stream.recv(4096)
        backend.start(name)
        times = []
        for number in range(rounds + 20):
            started = time.perf_counter()
            stream.sendall(_ECHOED)
            missing = len(_ECHOED) + _MUX_BYTES
            while missing > 0:
                missing -= len(stream.recv(missing))
            if number >= 20:
                times.append(time.perf_counter() - started)
    return times


async def docker_exec(config: SandboxConfig, code: str, rounds: int) -> list[float]:
    """Seconds of `docker exec … python3 -c code` in a running box, by the Docker SDK."""
    backend = DockerBackend(config)
    box = await backend.create()
    try:
        return [await backend.call(backend.execute, box.name, ["python3", "-c", code]) for _ in range(rounds)]
    finally:
        await box.destroy()
        await backend.close()


def jupyter_problem(python: str) -> str | None:
    """Why a Python has no Jupyter kernel, or None. Blocking."""
    found = subprocess.run(
        [python, "-c", "import jupyter_client, ipykernel"], capture_output=True, text=True, timeout=60
    )
    return None if found.returncode == 0 else f"{python} has no jupyter_client and ipykernel"


async def jupyter_kernel(code: str, rounds: int, python: str | None = None) -> list[float]:
    """Seconds of a cell in a Jupyter kernel, a plain process of this machine. Raises RuntimeError without one."""

    def run() -> list[float]:
        chosen = python or sys.executable
        problem = jupyter_problem(chosen)
        if problem is not None:
            raise RuntimeError(problem)
        command = [chosen, "-c", _JUPYTER, str(rounds), code]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if done.returncode != 0:
            raise RuntimeError(f"the Jupyter kernel did not run: {done.stderr.strip()[-300:]}")
        times = json.loads(done.stdout.strip().splitlines()[-1])
        return [float(seconds) for seconds in times]

    return await asyncio.to_thread(run)


async def new_process(code: str, rounds: int) -> list[float]:
    """Seconds of a new Python process."""

    def run() -> list[float]:
        times = []
        for _ in range(rounds):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-I", "-c", code], check=True)
            times.append(time.perf_counter() - started)
        return times

    return await asyncio.to_thread(run)
