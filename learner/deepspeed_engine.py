"""One rank of DeepSpeed: process group, settings, optimiser, and a step that never applies a gradient that is not
finite.

The caller owns the accumulation boundary: every `backward` accumulates, `take_step` reduces, clips and applies. Losses
arrive already divided by global counts; DeepSpeed averages over ranks, so `backward` multiplies by their number and
the gradient is the plain sum.
"""

from __future__ import annotations

import datetime
import logging
import os
import warnings
from typing import Any

import torch

from learner.optimizer import CheckedAdamW
from toolrl.config import LearnerConfig
from toolrl.config_deepspeed import deepspeed_problems

if not torch.cuda.is_available():
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
import deepspeed
from deepspeed.utils import logger as deepspeed_logger

deepspeed_logger.setLevel(logging.WARNING)
# DeepSpeed calls collectives by names that torch renames, once a call.
warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")


def join_process_group(
    *, rank: int, world: int, address: str, port: int, device: torch.device, timeout_s: float
) -> None:
    """Meets the other ranks at `address:port`; raises within `timeout_s` when they do not come."""
    if torch.distributed.is_initialized():
        return
    # DeepSpeed's shared-memory collectives would be compiled here for a minute and need a compiler; gloo needs neither.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK="0", MASTER_ADDR=address, MASTER_PORT=str(port))
    deepspeed.init_distributed(
        dist_backend="nccl" if device.type == "cuda" else "gloo",
        auto_mpi_discovery=False,
        verbose=False,
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout_s),
    )


def engine_settings(config: LearnerConfig, *, dtype: str, world: int) -> dict[str, Any]:
    """DeepSpeed's own config; `config.deepspeed` is merged over it.

    Raises:
        ValueError: `config.deepspeed` sets what cannot be honoured; all of it is named.
    """
    if problems := list(deepspeed_problems(config)):
        raise ValueError("\n".join(str(problem) for problem in problems))
    # DeepSpeed has no stage 0 with 16-bit weights and float32 accumulation; its stage 1 on one rank is just that.
    stage = max(config.zero_stage, 1) if dtype == "bfloat16" else config.zero_stage
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": False}
    if config.offload and stage > 0:
        zero["offload_optimizer"] = {"device": "cpu"}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        # More than 1, so that every path of DeepSpeed accumulates; where the boundary is, we say.
        "gradient_accumulation_steps": 2,
        "train_batch_size": 2 * world,
        "managed_gradient_accumulation": False,
        "gradient_clipping": config.gradient_clip,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": None,
    }
    if dtype == "bfloat16":
        settings["bf16"] = {"enabled": True, "check_grad_overflow": True}
        settings["data_types"] = {"grad_accum_dtype": "fp32"}
    return _merged(settings, config.deepspeed)


class DeepSpeedEngine:
    """DeepSpeed's engine around the policy, reduced to forward, backward and step."""

    def __init__(self, policy: torch.nn.Module, config: LearnerConfig, *, dtype: str, world: int) -> None:
        self.world = world
        settings = engine_settings(config, dtype=dtype, world=world)
        plain = settings["zero_optimization"]["stage"] == 0
        first, second = config.betas
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        options: dict[str, Any] = {
            "lr": config.learning_rate,
            "betas": (first, second),
            "weight_decay": config.weight_decay,
            "fused": True,
        }
        self.base_optimizer: torch.optim.Optimizer
        if plain:
            self.base_optimizer = CheckedAdamW(trained, clip=settings["gradient_clipping"], **options)
            settings["gradient_clipping"] = 0.0  # said, because DeepSpeed's default is 1
        else:
            self.base_optimizer = torch.optim.AdamW(trained, **options)
        self.raw, *_ = deepspeed.initialize(model=policy, optimizer=self.base_optimizer, config=settings)
        if plain and world == 1:
            self.raw.enable_backward_allreduce = False  # nobody to reduce with

    @property
    def module(self) -> Any:
        return self.raw.module

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.raw(*args, **options)

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulates the gradient of `loss`, a part of the global sum.

        A loss that is not finite poisons the gradient on purpose: so every rank, whose own loss may be fine, skips the
            step.
        """
        scale = torch.where(torch.isfinite(loss.detach()), float(self.world), float("nan"))
        self.raw.backward(loss * scale, scale_wrt_gas=False)

    def take_step(self, learning_rate: float) -> tuple[float, bool]:
        """(global gradient norm before clipping, whether the step was applied); no gradient is left."""
        for group in self.raw.optimizer.param_groups:
            group["lr"] = learning_rate
        self.raw.step()
        if self.raw.optimizer.overflow:
            return float("inf"), False
        return float(self.raw.get_global_grad_norm()), True

    def reset_optimizer(self) -> None:
        """Forgets the optimiser's moments, as after a supervised start."""
        for state in self.base_optimizer.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor):
                    value.zero_()


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
