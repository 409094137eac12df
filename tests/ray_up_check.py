"""Ray's own cluster launcher with the file that is rendered for it: three machines that are reached by ssh. From a fourth one,
`ray up`, a run that is submitted through a tunnel and followed, and `ray down`. Not part of CI: `make ray-up-check`, minutes.

The machines have a network, processes, temporary files and a home of their own, so that `ray stop` on one of them is not
felt on another, nor by anybody else here.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.requirements import need

need("ray", "vllm", "deepspeed", "netns", "sshd")

from actors.replay import read_ledger
from tests.integration.net_hosts import Host, hosts
from toolrl.monitors.metrics_log import read_metrics

STEPS, GROUPS, SIZE = 2, 2, 4
SETTINGS: dict[str, Any] = {
    "base": "quickstart-cpu",
    "name": "upped",
    "cold_start": {"steps": 5, "traces": 16},
    "tasks": {"held_out_tasks": 0},
    "sandbox": {"backend": "process"},
    "loop": {"steps": STEPS, "groups_per_step": GROUPS, "group_size": SIZE, "checkpoint_every_steps": 0},
    "learner": {"updates_per_batch": 1},
    "buffer": {"drop_uniform_groups": False},
    "placement": {"sandbox": "hosts"},
}
# A machine: what is its own is mounted over the shared one's, then an ssh server keeps it alive.
MACHINE = """
hostname {name}
mount --make-rprivate /
mkdir -p /run/sshd /tmp/ray {home}/tmp {home}/work
mount -t tmpfs -o mode=755 tmpfs /run/sshd
mount -t tmpfs tmpfs /dev/shm
mount --bind {home}/tmp /tmp/ray
mount -t overlay overlay -o lowerdir=/root,upperdir={home}/root,workdir={home}/work /root
exec /usr/sbin/sshd -D -e -f /dev/null -h {key} -o PidFile=none -o StrictModes=no -o UsePAM=no \
    -o PermitRootLogin=prohibit-password -o AuthorizedKeysFile={key}.pub
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def machine(host: Host, folder: Path, key: Path) -> Path:
    """Starts its ssh server; its home."""
    home = folder / f"home-{host.name}"
    (home / "root" / ".ssh").mkdir(parents=True)
    (home / "root" / ".bash_profile").write_text(f"export PATH={Path(sys.executable).parent}:$PATH OMP_NUM_THREADS=1\n")
    script = MACHINE.format(name=host.name, home=home, key=key)
    apart = ["unshare", "--mount", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
    host.run([*apart, "bash", "-euc", script], folder / f"{host.name}.log", {})
    return home


def wait_until(what: str, done: Callable[[], bool], deadline_s: float, log: Path) -> None:
    until = time.monotonic() + deadline_s
    while not done():
        assert time.monotonic() < until, f"{what} did not come; {log.read_text(errors='replace')[-3000:]}"
        time.sleep(0.2)


def ray_runs(host: Host) -> bool:
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one that has just ended
        words = b" ".join(Path(f"/proc/{pid}/cmdline").read_bytes() for pid in host.pids())
        return b"/raylet/raylet" in words or b"gcs_server" in words
    return True


def test_ray_up_brings_up_a_cluster_that_trains(tmp_path: Path) -> None:
    key, settings, cluster = tmp_path / "key", tmp_path / "run.yaml", tmp_path / "cluster"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    log = tmp_path / "desk-commands.log"

    with hosts("desk", "head", "rollout", "sandbox") as made:
        for host in made.values():
            machine(host, tmp_path, key)
        groups = [
            {"name": "head", "cpus": 2, "resources": {"group-learner": 1}, "hosts": [made["head"].address]},
            {"name": "rollout", "cpus": 1, "hosts": [made["rollout"].address]},
            {"name": "sandbox", "cpus": 1, "hosts": [made["sandbox"].address]},
        ]
        mounts = [{"target": str(tmp_path), "source": str(tmp_path)}]
        described = {"groups": groups, "mounts": mounts, "ray_user": "root", "ray_key": str(key)}
        settings.write_text(json.dumps(SETTINGS | {"runs_dir": str(tmp_path / "runs"), "cluster": described}))

        # One does not enter a machine but through its ssh server.
        options = ["-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null", "-o", "LogLevel=ERROR"]

        def desk(command: str, *flags: str) -> subprocess.Popen[bytes]:
            login = f"bash -lc {shlex.quote(command)}"
            ssh = ["ssh", *options, "-i", str(key), *flags, f"root@{made['desk'].address}", login]
            return made["desk"].run(ssh, log, {})

        def done(command: str, deadline_s: float) -> None:
            code = desk(command).wait(deadline_s)
            assert code == 0, f"{command}: {code}; {log.read_text(errors='replace')[-5000:]}"

        wait_until("the desk", lambda: desk("true").wait(20) == 0, 20, log)
        done(f"cd {tmp_path}; toolrl launch {settings} --target ray --dry-run --out {cluster}", 120)
        done(f"cd {cluster}; ray up --yes ray-cluster.yaml", 300)
        to_head = f"ssh {shlex.join(options)} -i {key}"
        tunnel = f"{to_head} -f -N -L 8265:127.0.0.1:8265 root@{made['head'].address} >/dev/null 2>&1"
        done(tunnel, 20)
        auth = f"export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH={cluster}/ray-token"
        done(f"{auth}; toolrl launch {settings} --target ray", 600)
        done(f"cd {cluster}; ray down --yes ray-cluster.yaml", 180)

        # `ray down` stops Ray on the head; on the others it ends by itself when it has missed the head for a minute.
        wait_until("the end of Ray", lambda: not any(ray_runs(host) for host in made.values()), 150, log)

    said = log.read_text(errors="replace")
    assert "submitted to ray as upped-" in said
    rows = read_metrics(tmp_path / "runs" / "upped")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    ledger = read_ledger(tmp_path / "runs" / "upped" / "ledger.sqlite")
    assert ledger.balances and ledger.trained == STEPS * GROUPS * SIZE
