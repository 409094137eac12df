"""How a run is laid out, as far as its speed depends on it: read from the config, or tried by `best_split`."""

from __future__ import annotations

from dataclasses import dataclass

from toolrl.config import RunConfig


@dataclass(frozen=True)
class Layout:
    """Counts and bounds. `boxes`: interpreter sessions of one worker; 0 where no tool needs one."""

    workers: int
    learner_ranks: int
    tensor_parallel: int  # GPUs of an engine, its stages of layers counted
    concurrency: int  # episodes at once on a worker
    engine_requests: int  # requests that an engine decodes at once
    boxes: int
    groups_per_step: int
    group_size: int
    max_staleness: int
    max_turns: int
    park_after_s: float
    colocated: bool = False

    @classmethod
    def of(cls, config: RunConfig) -> Layout:
        """The layout of a config."""
        interprets = any(tool.name == "python" for tool in config.tools)
        pools = config.placement.sandbox_hosts if config.placement.sandbox == "hosts" else config.rollout.workers
        sessions = config.sandbox.max_sessions * pools / config.rollout.workers
        return cls(
            workers=config.rollout.workers,
            learner_ranks=config.learner.ranks,
            tensor_parallel=config.engine.tensor_parallel * config.engine.pipeline_parallel,
            concurrency=config.rollout.concurrency,
            engine_requests=config.engine.max_concurrent_requests,
            boxes=max(1, round(sessions)) if interprets else 0,
            groups_per_step=config.loop.groups_per_step,
            group_size=config.loop.group_size,
            max_staleness=config.buffer.max_staleness,
            max_turns=config.rollout.max_turns,
            park_after_s=config.rollout.park_after_s,
            colocated=config.placement.mode == "colocated",
        )

    @property
    def gpus(self) -> int:
        """GPUs that this layout fills."""
        engines = self.workers * self.tensor_parallel
        return max(engines, self.learner_ranks) if self.colocated else engines + self.learner_ranks

    @property
    def batch(self) -> int:
        """Trajectories of one step."""
        return self.groups_per_step * self.group_size
