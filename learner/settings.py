"""What a learner rank is told at its start. Imports no torch, so that a driver can make it."""

from __future__ import annotations

from dataclasses import dataclass

from toolrl.config import AlgorithmConfig, LearnerConfig


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
