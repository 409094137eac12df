"""Hosts of one machine: network namespaces with addresses of their own on a switch of their own; nothing of the machine's own
network is touched."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

PREFIX = "toolrl"
NETWORK = "10.77.0"


@dataclass
class Host:
    """One namespace; `run` starts processes in it."""

    name: str
    address: str
    namespace: str
    switch: str
    port: str
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def run(self, command: list[str], log: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Starts a command, its output in a file."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.namespace, *command],
            stdout=log.open("ab"),
            stderr=subprocess.STDOUT,
            env=os.environ | dict(environment),
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def ask(self, command: list[str], environment: Mapping[str, str], timeout_s: float = 60.0) -> str:
        """What a command prints. Raises RuntimeError where it fails."""
        words = ["ip", "netns", "exec", self.namespace, *command]
        ours = os.environ | dict(environment)
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=False, env=ours)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")
        return done.stdout

    def pids(self) -> list[int]:
        """Of every process in the namespace."""
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]

    def cut_off(self) -> None:
        """No packet reaches it or leaves it."""
        _ip("netns", "exec", self.switch, "ip", "link", "set", self.port, "down")

    def reconnect(self) -> None:
        _ip("netns", "exec", self.switch, "ip", "link", "set", self.port, "up")

    def kill(self) -> None:
        """As if its power were cut: every process in the namespace gets SIGKILL."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self.processes:
            process.wait(10)


@contextlib.contextmanager
def hosts(*names: str) -> Iterator[dict[str, Host]]:
    """So many hosts on one switch; gone at the end, with everything that ran in them."""
    mark = f"{PREFIX}-{os.getpid()}"
    switch, made = f"{mark}-switch", []
    _ip("netns", "add", switch)
    try:
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names, 1):
            host = Host(name, f"{NETWORK}.{number}", f"{mark}-{name}", switch, f"port{number}")
            _ip("netns", "add", host.namespace)
            made.append(host)
            _ip("-n", switch, "link", "add", host.port, "type", "veth", "peer", "name", "eth0", "netns", host.namespace)
            _ip("-n", switch, "link", "set", host.port, "master", "br0")
            _ip("-n", switch, "link", "set", host.port, "up")
            _ip("-n", host.namespace, "addr", "add", f"{host.address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.namespace, "link", "set", device, "up")
        yield {host.name: host for host in made}
    finally:
        for host in made:
            host.kill()
        time.sleep(0.2)
        for namespace in [*(host.namespace for host in made), switch]:
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
