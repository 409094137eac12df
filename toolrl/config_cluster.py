"""The machines of a cluster, described once for every launcher (`toolrl launch`). Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Optional

# OmegaConf reads these annotations at run time and wants Optional[X] spelled so.
# ruff: noqa: UP045


@dataclass
class GroupConfig:
    """Machines of one kind. The group `head` holds driver and replay buffer; its name is a Ray resource of its nodes."""

    name: str = ""  # head, rollout, learner, sandbox, or one of yours
    nodes: int = 1
    cpus: int = 8  # of each node; so the rest
    memory_gib: int = 32
    gpus: int = 0
    gpu_type: Optional[str] = None  # Slurm's word for it, as in --gres=gpu:h100:8
    resources: dict[str, float] = field(default_factory=dict)  # further Ray resources, e.g. {sandbox: 1}
    selector: dict[str, str] = field(default_factory=dict)  # kuberay: labels of the nodes
    partition: Optional[str] = None  # slurm
    hosts: list[str] = field(default_factory=list)  # ray: addresses of machines that are there already


@dataclass
class MountConfig:
    """A folder that every node sees at the same place."""

    target: str = ""  # in the containers, e.g. /runs
    source: str = ""  # a folder of the machines; kuberay: the name of a PersistentVolumeClaim
    read_only: bool = False


@dataclass
class SecretConfig:
    """A secret that becomes an environment variable. Its value never stands in a config, a manifest or a log."""

    variable: str = ""  # e.g. HF_TOKEN; compose, slurm and ray take it from the environment of `toolrl launch`
    name: str = ""  # kuberay: of the Secret
    key: str = ""  # kuberay: in the Secret


@dataclass
class ClusterConfig:
    """Where `toolrl launch` runs a config, and with what."""

    image: str = "toolrl:cpu"  # of every node; deploy/docker holds the files
    engine_image: str = "docker:28-dind"  # kuberay: the Docker engine beside a sandbox host
    groups: list[GroupConfig] = field(default_factory=list)  # none: derived from the placement
    gpus_per_node: int = 8  # of derived groups
    mounts: list[MountConfig] = field(default_factory=list)  # one must hold runs_dir
    environment: dict[str, str] = field(default_factory=dict)
    secrets: list[SecretConfig] = field(default_factory=list)
    namespace: str = "default"  # kuberay
    runtime_class: Optional[str] = None  # kuberay: of the sandbox pods, e.g. gvisor
    account: Optional[str] = None  # slurm
    time_limit: str = "24:00:00"  # slurm: [DAYS-]HOURS:MINUTES:SECONDS, or seconds
    notice_s: int = 300  # slurm: so long before the time is up the run is told to end; more than a step takes
    setup: list[str] = field(default_factory=list)  # slurm: lines before the start, e.g. `module load cuda`
    container_flags: list[str] = field(default_factory=list)  # slurm: of srun, e.g. --container-image=…
    ray_user: str = "ubuntu"  # ray: of ssh
    ray_key: Optional[str] = None  # ray: a private key of ssh; `ray up` copies it to the head for the others
    job_address: str = "http://127.0.0.1:8265"  # ray: where jobs are submitted; a tunnel to the head's loopback
    auth: Literal["token", "none"] = "token"  # Ray's token between all nodes; none only in a closed network
