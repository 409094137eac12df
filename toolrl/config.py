"""Every setting of a run, as typed dataclasses with units in their names. Imports no torch.

A run's settings are one `RunConfig`, built by `toolrl.presets.load` from a preset or a YAML file plus `key=value`
overrides, and checked by `toolrl.config_checks` before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Optional

# OmegaConf reads these annotations at run time and wants Optional[X] spelled so.
# ruff: noqa: UP045


@dataclass
class Named:
    """A registered part by name (or import path `module:attribute`), with its options."""

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class ModelConfig:
    """The policy."""

    # A Hugging Face folder or name, or `tiny:qwen3` for the built-in laptop-size model with random weights.
    path: str = "tiny:qwen3"
    dtype: Literal["float32", "bfloat16"] = "bfloat16"  # learner and engine alike
    chat_template: Optional[str] = None  # a Jinja file; None: the tokenizer's own
    template_options: dict[str, Any] = field(default_factory=dict)  # e.g. enable_thinking: false
    # What to do with a template that rewrites earlier turns: refuse to start, or split the trajectory there.
    on_rewritten_history: Literal["refuse", "split"] = "refuse"
    trust_remote_code: bool = False


@dataclass
class FamilyConfig:
    """One family of a task mix."""

    name: str = ""
    weight: float = 1.0
    options: dict[str, Any] = field(default_factory=dict)  # passed to the generator: difficulty, ranges, …


@dataclass
class TaskConfig:
    """Where tasks come from and how answers are checked."""

    kind: str = "reasoning_gym"  # reasoning_gym, rows, hub, or an import path
    families: list[FamilyConfig] = field(default_factory=list)  # reasoning_gym
    path: Optional[str] = None  # rows: a JSONL or Parquet file; hub: a dataset name
    split: str = "train"
    columns: dict[str, str] = field(default_factory=dict)  # our name -> the file's column, where they differ
    options: dict[str, Any] = field(default_factory=dict)
    system_prompt: str = "You are a helpful assistant. Use the tools to compute. Put the final answer in \\boxed{}."
    answer: Literal["boxed", "tag", "last_line"] = "boxed"  # how the final answer is found in the policy's last turn
    shuffle: bool = True
    held_out_tasks: int = 128  # kept apart for evaluation, never trained on
    verifier: Optional[str] = None  # None: the task's own, else math-verify; or an import path
    verifier_processes: int = 1
    verifier_deadline_s: float = 5.0


@dataclass
class ToolConfig:
    """One tool the policy may call."""

    name: str = "python"  # registered name or import path
    timeout_s: float = 5.0
    failure_rate: float = 0.0  # share of calls that fail on purpose, so that the policy learns to retry
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class SandboxSettings:
    """The code interpreter service; see docs of `sandbox`."""

    backend: Literal["auto", "docker", "process"] = "auto"
    image: str = "toolrl-sandbox:latest"
    runtime: str = "runc"
    min_sessions: int = 2
    max_sessions: int = 32
    memory_mib: int = 512
    max_output_bytes: int = 65536
    preimport: list[str] = field(default_factory=list)  # modules the interpreter imports once, e.g. [numpy, sympy]


@dataclass
class RolloutConfig:
    """Episodes: how they are sampled and where they end."""

    workers: int = 1
    concurrency: int = 64  # episodes at once on each worker
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    parser: str = "hermes"  # hermes, fenced, tagged, vllm:NAME, or an import path
    max_turns: int = 8  # policy turns
    max_calls: int = 8
    max_calls_per_turn: int = 4
    max_turn_tokens: int = 1024  # sampled tokens in one turn
    max_response_tokens: int = 4096  # sampled and shown tokens after the prompt
    max_context_tokens: int = 8192  # prompt and response
    max_observation_tokens: int = 1024  # one tool turn: all results of a policy turn
    truncate_observation: Literal["head", "tail", "middle"] = "middle"  # the part that is cut away
    lease_s: float = 60.0  # a worker that is silent for so long loses its tickets


@dataclass
class EngineConfig:
    """vLLM, one engine a rollout worker."""

    tensor_parallel: int = 1
    kv_cache_gib: float = 1.0  # CPU only
    gpu_memory_share: float = 0.85  # GPU only
    max_concurrent_requests: int = 64
    eager: bool = True
    cpu_threads: int = 1  # CPU only
    start_deadline_s: float = 300.0
    options: dict[str, Any] = field(default_factory=dict)  # further AsyncEngineArgs


@dataclass
class BufferConfig:
    """Replay buffer and staleness."""

    max_staleness: int = 1  # versions between the learner and a trajectory's oldest token; 0 is synchronous
    sampling: str = "fifo"  # fifo, freshest
    drop_uniform_groups: bool = True  # groups whose rewards have no spread teach nothing
    learner_lease_s: float = 600.0
    max_attempts: int = 4  # times one sample is tried before it is dropped as infra_error


@dataclass
class RewardConfig:
    """Named reward components with their weights."""

    components: list[Named] = field(default_factory=lambda: [Named("outcome"), Named("format")])
    weights: dict[str, float] = field(default_factory=dict)  # 1.0 where a component is not named
    deadline_s: float = 30.0


@dataclass
class AlgorithmConfig:
    """CTPO with GTPO advantages unless said otherwise; see shared equations in docs/algorithms.md."""

    advantage: Named = field(default_factory=lambda: Named("gtpo"))
    policy_loss: Named = field(default_factory=lambda: Named("ctpo"))
    correction: Optional[Named] = field(default_factory=lambda: Named("tis"))
    regularizers: list[Named] = field(default_factory=list)  # kl, entropy, llds; option `weight`
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"


@dataclass
class LearnerConfig:
    """DeepSpeed ranks."""

    ranks: int = 1
    zero_stage: int = 0
    offload: bool = False  # optimiser state to the CPU
    learning_rate: float = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    gradient_clip: float = 1.0
    updates_per_batch: int = 4  # optimiser steps on one batch; CTPO acts from the second
    tokens_per_micro_batch: int = 8192
    logprob_chunk_tokens: int = 1024  # rows of logits that exist at once
    gradient_checkpointing: bool = False
    cpu_threads: int = 1
    step_deadline_s: float = 1800.0
    deepspeed: dict[str, Any] = field(default_factory=dict)  # merged into DeepSpeed's own config


@dataclass
class WeightsConfig:
    """Publication of weights from the learner to the engines."""

    transport: Literal["auto", "shared_memory", "nccl", "ipc"] = "auto"
    deadline_s: float = 120.0
    checksum: bool = True


@dataclass
class ColdStartConfig:
    """Supervised start on interaction-dense traces; `steps: 0` skips it."""

    steps: int = 0
    traces: int = 4096
    traces_path: Optional[str] = None  # ready-made traces instead of generated ones
    batch_size: int = 64
    learning_rate: float = 2e-3
    warmup_steps: int = 20
    min_calls: int = 1  # calls in a trace
    max_calls: int = 2
    direct_guess_share: float = 0.0  # traces that answer at once, usually wrongly: a start that is weak on purpose
    malformed_call_share: float = 0.0
    wrong_code_share: float = 0.0
    retry_share: float = 0.2  # traces in which the first call fails and is repeated


@dataclass
class LoopConfig:
    """The run: how long, how big a batch, what is kept."""

    steps: int = 100
    groups_per_step: int = 16
    group_size: int = 8
    checkpoint_every_steps: int = 20
    keep_checkpoints: int = 2
    eval_every_steps: int = 0  # 0: before the first and after the last step only
    eval_samples: int = 1  # k of avg@k and pass@k
    eval_temperature: Optional[float] = None  # None: that of the rollouts
    batch_deadline_s: float = 900.0  # a step whose batch does not come by then fails and says for whom it waited
    shown_trajectories_per_step: int = 4  # written for `toolrl show`


@dataclass
class PlacementConfig:
    """Who runs where."""

    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    sandbox: Literal["local", "hosts"] = "local"  # in the rollout workers, or on nodes with the Ray resource `sandbox`
    sandbox_hosts: int = 1  # each takes one unit of that resource
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus_per_learner_rank: float = 1.0
    ray_address: Optional[str] = None  # None: start a local cluster


@dataclass
class RunConfig:
    """A whole run."""

    name: str = "run"
    runs_dir: str = "runs"
    seed: int = 0
    quiet: bool = False  # plain log lines instead of the live screen
    wandb_project: Optional[str] = None  # also send metrics to Weights & Biases
    model: ModelConfig = field(default_factory=ModelConfig)
    tasks: TaskConfig = field(default_factory=TaskConfig)
    tools: list[ToolConfig] = field(default_factory=lambda: [ToolConfig()])
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    buffer: BufferConfig = field(default_factory=BufferConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
