"""Which resources a run needs, part by part, and whether they are there. Pure: what is there comes as a dict.

The keys are Ray's: `CPU`, `GPU`, and `sandbox` (one a node that hosts interpreters). `plan` is what a launch calls
first: a placement that cannot be satisfied fails at once and says what is missing. Memory is an estimate for people,
never a reason to refuse.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from toolrl import config_checks
from toolrl.config import EngineConfig, RunConfig
from toolrl.config_model_rewards import options_in_effect
from toolrl.errors import ConfigError, Problem, UserError

Device = Literal["cpu", "cuda"]


class PlacementError(UserError):
    """The machines lack something that the config asks for."""


@dataclass(frozen=True)
class Part:
    """One kind of process: how many, and what each needs."""

    name: str
    count: int
    cpus: float = 0.0
    gpus: float = 0.0
    sandbox: float = 0.0
    memory_gib: float = 0.0  # of the host, an estimate
    gpu_memory: str = ""  # an estimate in words
    note: str = ""


@dataclass(frozen=True)
class Placement:
    """Every part of a run, on the chosen device."""

    device: Device
    mode: str  # disaggregated or colocated
    parts: tuple[Part, ...]

    def total(self) -> dict[str, float]:
        """What all parts need together, by Ray's names. Colocated engines and learner ranks, the first two parts, share their
        GPUs."""
        gpus = [part.count * part.gpus for part in self.parts]
        return {
            "CPU": sum(part.count * part.cpus for part in self.parts),
            "GPU": max(gpus[:2]) + sum(gpus[2:]) if self.mode == "colocated" else sum(gpus),
            "sandbox": sum(part.count * part.sandbox for part in self.parts),
        }

    @property
    def memory_gib(self) -> float:
        return sum(part.count * part.memory_gib for part in self.parts)


def takes_turns(config: RunConfig) -> bool:
    """Whether engines sleep while the learner works, in the same memory."""
    return config.placement.mode == "colocated"


def gpus_of_a_node(engine: EngineConfig) -> float:
    """GPUs that an engine takes of each of its nodes."""
    return engine.tensor_parallel * engine.pipeline_parallel / engine.nodes


def gpu_fraction(config: RunConfig) -> float:
    """What an engine, and a learner rank, ask of a GPU: half where they share one."""
    return 0.5 if takes_turns(config) else 1.0


def resolve_device(config: RunConfig, available: Mapping[str, float]) -> Device:
    """`cpu` or `cuda`; `auto` takes GPUs where there are any."""
    if config.placement.device != "auto":
        return config.placement.device
    return "cuda" if available.get("GPU", 0) > 0 else "cpu"


def plan(config: RunConfig, available: Mapping[str, float]) -> Placement:
    """The placement on these resources.

    Raises:
        ConfigError: the config cannot run on the device that was found.
        PlacementError: something is missing; names each resource, how much there is and what to change.
    """
    placement = needed(config, resolve_device(config, available))
    faults = device_faults(config, placement.device)
    if faults:
        raise ConfigError(faults)
    if lacking := missing(placement, available):
        raise PlacementError("the placement cannot be satisfied:\n" + "\n".join(f"- {line}" for line in lacking))
    return placement


def device_faults(config: RunConfig, device: Device) -> list[Problem]:
    """What of an `auto` config cannot run on the device that was found."""
    chosen = replace(config, placement=replace(config.placement, device=device))
    return [problem for problem in config_checks.device(chosen) if not problem.warning]


def missing(placement: Placement, available: Mapping[str, float]) -> list[str]:
    """A line for each resource that is short."""
    lines = []
    for resource, need in placement.total().items():
        there = available.get(resource, 0)
        if need <= there + 1e-6:
            continue
        users = [f"{part.count} × {part.name}" for part in placement.parts if _asks(part, resource)]
        lines.append(f"{resource}: needs {need:g} ({', '.join(users)}), there {_are(there)}; {_REMEDY[resource]}")
    return lines


def missing_for_workers(config: RunConfig, free: Mapping[str, float], device: Device) -> list[str]:
    """As `missing`, for `rollout.workers` workers more beside what runs already; `free` is what is left."""
    of_engines = tuple(part for part in needed(config, device).parts if part.name in ENGINE_PARTS)
    return missing(Placement(device, config.placement.mode, of_engines), free)


def too_large(placement: Placement, node_gpus: float) -> list[str]:
    """A line for each part that takes more GPUs of a node than the largest one has."""
    remedy = {"rollout worker": "spread each engine over several nodes (engine.nodes), or lower engine.tensor_parallel"}
    return [
        f"a {part.name} takes {part.gpus:g} GPUs of one node, and the largest has {node_gpus:g}; "
        f"{remedy.get(part.name, 'lower what it asks for')}"
        for part in placement.parts
        if part.gpus > node_gpus
    ]


ENGINE_PARTS = ("rollout worker", "engine node")
_REMEDY = {
    "CPU": "lower rollout.workers, learner.ranks or their cpu_threads, or add machines (placement.ray_address)",
    "GPU": "lower rollout.workers, engine.tensor_parallel or learner.ranks, or set placement.mode=colocated",
    "sandbox": "start a node with `ray start --resources '{\"sandbox\": 1}'`, or set placement.sandbox=local",
}


def _asks(part: Part, resource: str) -> bool:
    return {"CPU": part.cpus, "GPU": part.gpus, "sandbox": part.sandbox}[resource] > 0


def _are(count: float) -> str:
    return "is 1" if count == 1 else f"are {count:g}"


def needed(config: RunConfig, device: Device) -> Placement:
    """Every part of the run with what each asks of Ray."""
    on_gpu = device == "cuda"
    colocated = config.placement.mode == "colocated"
    workers, engine = config.rollout.workers, config.engine
    parts = [
        Part(
            "rollout worker",
            workers,
            cpus=1.0 if on_gpu else float(engine.cpu_threads),
            gpus=gpus_of_a_node(engine) if on_gpu else 0.0,
            memory_gib=4.0 if on_gpu else 1.5 + config.engine.kv_cache_gib + 2 * billions_of(config.model.path),
            gpu_memory=f"{engine.gpu_memory_share:.0%} of each" if on_gpu else "",
            note=f"vLLM engine, {config.rollout.concurrency} episodes at once{_in_parallel(engine)}",
        ),
        Part(
            "learner rank",
            config.learner.ranks,
            cpus=1.0 if on_gpu else float(config.learner.cpu_threads),
            gpus=config.placement.gpus_per_learner_rank if on_gpu else 0.0,
            memory_gib=_learner_host_gib(config, on_gpu),
            gpu_memory=f"about {_learner_gpu_gib(config):.0f} GiB + activations" if on_gpu else "",
            note=f"DeepSpeed, ZeRO {config.learner.zero_stage}"
            + ("; each shares a GPU with an engine" if colocated else ""),
        ),
        Part("replay buffer", 1, memory_gib=0.5, note=f"staleness at most {config.buffer.max_staleness}"),
    ]
    if engine.nodes > 1:
        parts.append(
            Part(
                "engine node",
                workers * (engine.nodes - 1),
                cpus=1.0 if on_gpu else float(engine.cpu_threads),
                gpus=gpus_of_a_node(engine) if on_gpu else 0.0,
                memory_gib=4.0 if on_gpu else 1.5 + engine.kv_cache_gib + 2 * billions_of(config.model.path),
                gpu_memory=f"{engine.gpu_memory_share:.0%} of each" if on_gpu else "",
                note="the engines' shares on further nodes",
            )
        )
    if (prm := options_in_effect(config.rewards, "prm")) is not None:
        parts.append(_reward_worker_part(prm))
    if any(tool.name == "python" for tool in config.tools):
        parts.append(_sandbox_part(config))
    parts.append(
        Part(
            "answer checker",
            workers * config.tasks.verifier_processes,
            memory_gib=0.3,
            note="beside the rollout workers",
        )
    )
    return Placement(device, config.placement.mode, tuple(parts))


def _in_parallel(engine: EngineConfig) -> str:
    found = [("tensor parallel", engine.tensor_parallel), ("pipeline parallel", engine.pipeline_parallel)]
    words = [f", {name} {count}" for name, count in found if count > 1]
    return "".join(words) + (f", over {engine.nodes} nodes" if engine.nodes > 1 else "")


def _reward_worker_part(options: Mapping[str, Any]) -> Part:
    on_gpu = options["device"] == "cuda"
    return Part(
        "reward worker",
        options["workers"],
        cpus=1.0 if on_gpu else float(options["cpu_threads"]),
        gpus=options["gpus"] if on_gpu else 0.0,
        memory_gib=1.5,
        gpu_memory="its model + activations" if on_gpu else "",
        note=f"process reward model {options.get('model')}",
    )


def _sandbox_part(config: RunConfig) -> Part:
    sessions, box_gib = config.sandbox.max_sessions, config.sandbox.memory_mib / 1024
    note = f"{config.sandbox.backend} backend, up to {sessions} sessions of at most {config.sandbox.memory_mib} MiB"
    if config.placement.sandbox == "hosts":
        hosts = config.placement.sandbox_hosts
        return Part("sandbox host", hosts, cpus=1.0, sandbox=1.0, memory_gib=sessions * min(box_gib, 0.05), note=note)
    return Part(
        "interpreter pool",
        config.rollout.workers,
        memory_gib=sessions * min(box_gib, 0.05),
        note=note + ", in the worker",
    )


def billions_of(model: str) -> float:
    """Parameters of a model, in billions, as its name says them ("Qwen/Qwen3-4B": 4); 0 where it does not."""
    found = re.search(r"(\d+(?:\.\d+)?)\s*[bB](?![a-zA-Z])", model.rpartition("/")[2])
    return float(found.group(1)) if found else 0.0


def learner_state_bytes(config: RunConfig, billions: float) -> float:
    """Weights, gradients and optimiser state of one rank: 2 + 4 + 12 bytes a parameter, split by the ZeRO stage. An adapter's own
    are next to nothing."""
    ranks, stage = config.learner.ranks, config.learner.zero_stage
    trained = 0.0 if config.model.lora.rank else billions
    optimizer = 0.0 if config.learner.offload else 12 * trained / (ranks if stage >= 1 else 1)
    gradients = 4 * trained / (ranks if stage >= 2 else 1)
    weights = 2 * billions / (ranks if stage >= 3 else 1)
    return (optimizer + gradients + weights) * 1e9


def _learner_gpu_gib(config: RunConfig) -> float:
    return math.ceil(learner_state_bytes(config, billions_of(config.model.path)) / 2**30)


def _learner_host_gib(config: RunConfig, on_gpu: bool) -> float:
    n, ranks = billions_of(config.model.path), config.learner.ranks
    if not on_gpu:
        return 1.5 + 16 * n
    waits = takes_turns(config) and config.learner.offload_while_generating != "never"
    return 4.0 + (12 * n / ranks if config.learner.offload or waits else 0.0)
