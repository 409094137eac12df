"""A real Slurm of one machine: munged, slurmctld, and a slurmd in each of several hosts with names and addresses of their own
(`net_hosts`). All its state lies in one folder; the machine's own Slurm, if it has one, is not touched."""

from __future__ import annotations

import contextlib
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.integration.net_hosts import Host, hosts

READY_DEADLINE_S = 30.0
# Heterogeneous jobs are placed by the backfill scheduler alone. A job that is put back may start again once its old credential
# has expired, after two minutes by default. Without control groups `linuxproc` finds a step's processes by their parents.
CONF = """
ClusterName=toolrl
SlurmctldHost={controller}({address})
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
PlugStackConfig={folder}/plugstack.conf
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
SchedulerType=sched/backfill
SchedulerParameters=bf_interval=1,sched_min_interval=100000,batch_sched_delay=0
SlurmdParameters=config_overrides
KillWait={kill_wait_s}
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{nodes}
PartitionName=work Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime={grace_s} OverSubscribe=NO
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 OverSubscribe=NO PreemptMode=OFF
"""
DAEMONS = ("slurmctld", "slurmscriptd", "slurmd", "slurmstepd")
KILL_WAIT_S, GRACE_S = 15, 60


@dataclass(frozen=True)
class SlurmCluster:
    """Commands go to the first host, as if somebody had logged in there."""

    hosts: Mapping[str, Host]
    folder: Path
    sockets: Path  # a short path
    environment: Mapping[str, str]

    @property
    def login(self) -> Host:
        return next(iter(self.hosts.values()))

    def run(self, *words: str, timeout_s: float = 30.0) -> str:
        """What a command prints. Raises RuntimeError where it fails."""
        return self.login.ask(list(words), self.environment, timeout_s)

    def start(self, words: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
        """A command that goes on; its output goes to a file."""
        return self.login.run(list(words), log, self.environment)

    def processes(self) -> list[psutil.Process]:
        """Everything that runs on the hosts beside Slurm's own daemons."""
        found = []
        for host in self.hosts.values():
            for pid in host.pids():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process = psutil.Process(pid)
                    if not process.name().lstrip(": ").startswith(DAEMONS):
                        found.append(process)
        return found


@contextlib.contextmanager
def slurm_cluster(
    folder: Path, nodes: Mapping[str, int], environment: Mapping[str, str] | None = None
) -> Iterator[SlurmCluster]:
    """A cluster while the context lasts.

    Args:
        folder: for configuration, state and logs.
        nodes: {host: how many processors Slurm believes it to have}; the first runs slurmctld too.
        environment: of every command.
    """
    path = f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin"
    conf = folder / "slurm.conf"
    ours = {"PATH": path, "SLURM_CONF": str(conf), **(environment or {})}
    sockets_folder = tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp")
    with sockets_folder as sockets, munged(folder), hosts(*nodes) as made:
        first = next(iter(made.values()))
        _write_configuration(folder, conf, made, nodes)
        first.run(_as_host(first.name, folder, "slurmctld", "-D", "-f", str(conf)), folder / "slurmctld.out", ours)
        for name, host in made.items():
            host.run(_as_host(name, folder, "slurmd", "-D", "-N", name, "-f", str(conf)), folder / f"{name}.out", ours)
        cluster = SlurmCluster(made, folder, Path(sockets), ours)
        _wait_for(cluster, len(nodes))
        yield cluster


@contextlib.contextmanager
def munged(folder: Path) -> Iterator[None]:
    """Munge's daemon with a key and a socket of its own."""
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    places = {"socket": "munge.socket", "pid-file": "munged.pid", "log-file": "munged.log", "seed-file": "munged.seed"}
    words = [f"--{name}={folder / place}" for name, place in places.items()]
    with (folder / "munged.out").open("wb") as said:
        process = subprocess.Popen(
            ["munged", "--foreground", "--force", f"--key-file={key}", "--num-threads=2", *words],
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    try:
        ends = time.monotonic() + READY_DEADLINE_S
        while not (folder / "munge.socket").exists():
            if process.poll() is not None or time.monotonic() > ends:
                raise RuntimeError(f"munged did not start: {(folder / 'munged.out').read_text()}")
            time.sleep(0.05)
        yield
    finally:
        process.terminate()
        process.wait(10)


def _write_configuration(folder: Path, conf: Path, made: Mapping[str, Host], nodes: Mapping[str, int]) -> None:
    lines = [
        f"NodeName={name} NodeAddr={host.address} NodeHostname={name} CPUs={nodes[name]} RealMemory=65536 State=UNKNOWN"
        for name, host in made.items()
    ]
    first = next(iter(made.values()))
    values = {"controller": first.name, "address": first.address, "folder": folder, "nodes": "\n".join(lines)}
    conf.write_text(CONF.format(**values, kill_wait_s=KILL_WAIT_S, grace_s=GRACE_S))
    (folder / "plugstack.conf").touch()
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # not used; looking for one fails in a namespace
    (folder / "state").mkdir()
    # As on many real hosts, a name of one's own leads to the loopback.
    for name in made:
        (folder / f"hosts-{name}").write_text(
            f"127.0.0.1 localhost\n127.0.1.1 {name}\n"
            + "".join(f"{host.address} {host.name}\n" for host in made.values() if host.name != name)
        )


def _as_host(name: str, folder: Path, *words: str) -> list[str]:
    """A command under the host's own name, with the host's own /etc/hosts."""
    script = 'hostname "$1"; mount --bind "$2" /etc/hosts; shift 2; exec "$@"'
    return ["unshare", "--uts", "--mount", "sh", "-ec", script, "-", name, str(folder / f"hosts-{name}"), *words]


def _wait_for(cluster: SlurmCluster, nodes: int) -> None:
    ends, said = time.monotonic() + READY_DEADLINE_S, ""
    while time.monotonic() < ends:
        with contextlib.suppress(RuntimeError):
            said = cluster.run("sinfo", "--noheader", "--Node", "--partition=work", "--format=%N %T")
            if said.count(" idle") == nodes:
                return
        time.sleep(0.2)
    log = (cluster.folder / "slurmctld.log").read_text(errors="replace")[-3000:]
    raise RuntimeError(f"the nodes did not come up in {READY_DEADLINE_S:g} s: {said}\n{log}")
