"""What a learner rank is told at its start. Imports no torch, so that a driver can make it."""

from __future__ import annotations

from dataclasses import dataclass, field

from toolrl.config import AlgorithmConfig, CriticConfig, LearnerConfig, LoraConfig, MonitorsConfig
from toolrl.monitors.control_tokens import ControlTokens


@dataclass(frozen=True, slots=True)
class RankSettings:
    """What a rank needs beyond its place among the ranks."""

    model_dir: str
    learner: LearnerConfig
    algorithm: AlgorithmConfig
    dtype: str = "float32"
    device: str = "cpu"
    seed: int = 0
    total_steps: int = 1  # optimiser steps of the run, for decaying schedules
    max_response_tokens: int = 4096  # the constant of `seq_mean_token_sum_norm`
    trust_remote_code: bool = False
    critic: CriticConfig = field(default_factory=CriticConfig)
    frozen: list[str] = field(default_factory=list)
    lora: LoraConfig = field(default_factory=LoraConfig)
    keep_reference: bool = False  # even where the config has no KL: a guard may give it a weight later
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    control: ControlTokens | None = None  # what to watch; None: nothing
