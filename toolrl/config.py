"""Every setting of a run, as typed dataclasses with units in their names. Imports no torch.

A run's settings are one `RunConfig`, built by `toolrl.presets.load` from a preset or a YAML file plus `key=value`
overrides, and checked by `toolrl.config_checks` before anything starts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal, Optional

from toolrl.config_cluster import ClusterConfig
from toolrl.config_supervision import SupervisionConfig
from toolrl.config_wording import WordingConfig

# OmegaConf reads these annotations at run time and wants Optional[X] spelled so.
# ruff: noqa: UP045


@dataclass
class Named:
    """A registered part by name (or import path `module:attribute`), with its options."""

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class LoraConfig:
    """Low-rank adapters (peft) instead of whole training: W + alpha / rank · B·A, and W stays as it was loaded."""

    rank: int = 0  # 0: off, all weights are trained
    alpha: float = 32.0
    dropout: float = 0.0  # must be 0: with dropout the same tokens would have other log-probabilities in each pass
    target_modules: list[str] = field(default_factory=lambda: ["all-linear"])  # names of linear layers
    # What travels to the engines: all weights with the adapter merged into them, or the adapter alone. An engine that
    # serves adapters generates more slowly: docs/weights.md.
    publish: Literal["merged", "adapter"] = "merged"


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
    frozen: list[str] = field(default_factory=list)  # weights that are not trained, as patterns: "model.embed_tokens.*"
    lora: LoraConfig = field(default_factory=LoraConfig)


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
    wording: WordingConfig = field(default_factory=WordingConfig)  # the same prompts in other words
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
    # The turn waits for the result, or gets a receipt at once and the result at the first turn boundary after it came.
    mode: Literal["await", "deferred"] = "await"
    deadline_s: Optional[float] = None  # after so long the model is told of a timeout; what comes later is discarded
    failure_rate: float = 0.0  # share of calls that fail on purpose, so that the policy learns to retry
    delay: dict[str, float] = field(default_factory=dict)  # {mean_s, p99_s}: so long a wait is drawn before each call
    rename: dict[str, str] = field(default_factory=dict)  # what the policy calls it: {python: run, python.code: source}
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
    park_after_s: float = 1.0  # an episode that waits longer for a tool gives its place to others meanwhile
    # The policy would end with results outstanding: it waits for them and goes on, or its answer stands.
    on_answer_with_pending: Literal["wait", "answer"] = "wait"
    pending_deadline_s: float = 60.0  # it waits so long; what has not come by then is a timeout
    lease_s: float = 60.0  # a worker that is silent for so long loses its tickets
    hand_over_grace_s: float = 20.0  # a worker that leaves waits so long for the turns that are under way
    # An episode goes on elsewhere and a recorded call now gives something else: start over, refuse, or go on.
    on_changed_replay: Literal["restart", "refuse", "accept"] = "restart"


@dataclass
class EngineConfig:
    """vLLM, one engine a rollout worker, of tensor_parallel × pipeline_parallel GPUs."""

    tensor_parallel: int = 1  # GPUs that share every layer
    pipeline_parallel: int = 1  # stages of layers, one after the other; each of tensor_parallel GPUs
    nodes: int = 1  # machines that an engine's GPUs lie on, equally many on each; above 1 only where one has too few
    kv_cache_gib: float = 1.0  # CPU only
    gpu_memory_share: float = 0.85  # GPU only
    sleep_level: int = 2  # colocated: asleep, its weights are given up (2), or wait in the host's memory (1)
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
    drop_uniform_groups: bool = True  # groups whose rewards have no spread teach nothing; others take their place
    max_refills: int = 10  # batches of groups without spread, one after the other, after which the run stops
    learner_lease_s: float = 600.0
    max_attempts: int = 4  # times one sample is tried before it is dropped as infra_error


@dataclass
class LateRewardConfig:
    """Rewards that reward workers deliver after the episode has ended; see docs/rewards.md."""

    names: list[str] = field(default_factory=list)  # rewards without a component: every trajectory waits for each
    deadline_s: float = 300.0  # after the trajectory came in; without its reward by then it is out of its group
    source: Literal["actor", "http"] = "actor"  # Ray actors deliver; or also whoever posts to the run's address
    http_host: str = "127.0.0.1"  # where that address is; anything but loopback is open to the network
    http_port: int = 0  # 0: a free one; runs/NAME/reward-callback.json says which, with the run's token
    bootstrap: bool = False  # train without waiting, the critic's values in place of what has not come


@dataclass
class RewardConfig:
    """Named reward components with their weights."""

    components: list[Named] = field(default_factory=lambda: [Named("outcome"), Named("format")])
    weights: dict[str, float] = field(default_factory=dict)  # 1.0 where a component is not named
    deadline_s: float = 30.0  # for all components of one trajectory, late rewards apart
    late: LateRewardConfig = field(default_factory=LateRewardConfig)


@dataclass
class AlgorithmConfig:
    """CTPO with GTPO advantages unless said otherwise; see shared equations in docs/algorithms.md."""

    advantage: Named = field(default_factory=lambda: Named("gtpo"))
    policy_loss: Named = field(default_factory=lambda: Named("ctpo"))
    correction: Optional[Named] = field(default_factory=lambda: Named("tis"))
    regularizers: list[Named] = field(default_factory=list)  # kl, entropy, llds; option `weight`
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"] = "token_mean"
    # Turns without a complete call or a final answer: trained as others, out of the loss, or out with their trajectory.
    void_turns: Literal["train", "mask", "drop_trajectory"] = "train"
    truncated: Literal["train", "mask"] = "train"  # trajectories that a token budget cut off: in the loss or out of it


@dataclass
class LearnerConfig:
    """DeepSpeed ranks."""

    ranks: int = 1
    zero_stage: int = 0
    offload: bool = False  # optimiser state to the CPU
    offload_reference: bool = False  # the reference model waits in the host's memory; on CPUs it is there anyway
    # Colocated: optimiser, master weights, gradients, critic and reference wait in the host's memory while engines generate.
    offload_while_generating: Literal["auto", "always", "never"] = "auto"  # auto: on a GPU
    learning_rate: float = 1e-6
    schedule: Literal["constant", "cosine", "linear"] = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    gradient_clip: float = 1.0
    updates_per_batch: int = 4  # optimiser steps on one batch; CTPO acts from the second
    tokens_per_micro_batch: int = 8192
    share_prefixes: Literal["auto", "on", "off"] = "auto"  # what sequences begin with in common is computed once
    logprob_chunk_tokens: int = 1024  # rows of logits that exist at once
    sequence_parallel: int = 1  # ranks that share one packed row, each with a slice of its tokens (Ulysses)
    gradient_checkpointing: bool = False
    cpu_threads: int = 1
    step_deadline_s: float = 1800.0
    deepspeed: dict[str, Any] = field(default_factory=dict)  # merged into DeepSpeed's own config


@dataclass
class CriticConfig:
    """A value function over policy turns, for advantages that need one; γ and λ are the advantage's options."""

    kind: Literal["none", "shared", "own"] = "none"  # a head on the policy's backbone, or a model of its own
    model: Optional[str] = None  # own: a Hugging Face folder with the policy's vocabulary; None: starts as the policy
    learning_rate: float = 1e-5
    weight_decay: float = 0.0
    gradient_clip: float = 1.0
    value_clip: Optional[float] = 0.2  # how far a value may move from its batch's first, in units of reward; None: free
    loss_weight: float = 1.0
    backbone_gradient: bool = False  # shared: let the value loss change the policy's backbone
    warmup_steps: int = 0  # the first steps of the loop, in which only the critic trains


@dataclass
class WeightsConfig:
    """Publication of weights from the learner to the engines."""

    # auto: ipc where an engine shares the learner's GPU, nccl between GPUs, else shared_memory; gloo: over TCP, for any device.
    transport: Literal["auto", "shared_memory", "gloo", "nccl", "ipc"] = "auto"
    deadline_s: float = 120.0
    bucket_mib: int = 256  # what bytes pass through on their way, beside the weights; each side has a few of these
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
    # One step a call, each of which needs those before it, and only traces that ran and whose answer is right.
    dense: bool = False
    min_calls: int = 1  # calls in a trace
    max_calls: int = 2
    direct_guess_share: float = 0.0  # traces that answer at once, usually wrongly: a start that is weak on purpose
    malformed_call_share: float = 0.0
    wrong_code_share: float = 0.0
    retry_share: float = 0.2  # traces in which the first call fails and is repeated


@dataclass
class GuardRuleConfig:
    """One guard: a metric, when it shows trouble, and what is done then; see docs/collapse.md."""

    name: str = ""
    metric: str = ""
    # Trouble when the level (the metric's mean over `window` steps) is below or above `threshold`; or lower by it than its
    # peak, or higher by it than its low; or above `threshold` times its running mean, and above `floor`.
    condition: Literal["below", "above", "drop_from_peak", "rise_from_low", "above_ema"] = "below"
    threshold: float = 0.0
    floor: float = 0.0  # above_ema only
    window: int = 1  # steps
    hold: int = 1  # so many levels in a row must show trouble
    min_steps: int = 0  # the metric's first so many steps fire nothing; peak, low and running mean learn from them
    cool_down_steps: int = 10  # after firing, the rule is quiet for so long
    release: Optional[float] = None  # in the place of `threshold` while trouble lasts; None: the threshold
    follow_up_steps: int = 5  # after firing, what came of it is told so much later
    action: Named = field(default_factory=lambda: Named("tell"))


@dataclass
class GuardsConfig:
    """What is watched while the run goes on, and what is done about it; see docs/collapse.md."""

    preset: Optional[str] = None  # rules that ship with toolrl: watch, standard, strict
    rules: list[GuardRuleConfig] = field(default_factory=list)  # more of them; one of a preset rule's name replaces it


@dataclass
class MonitorsConfig:
    """What is measured beside learning; most monitors cost nothing worth a setting."""

    # Every so many steps some correct trajectories are read before and after the updates: did they become less likely? 0: never
    every_steps: int = 1
    # So many; each costs two forward passes, against three and more passes an update for every trajectory
    trajectories: int = 8


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
    eval_ood: bool = False  # before the first and after the last step also out of distribution, see `eval.ood`
    eval_deadline_s: float = 3600.0  # a worker that has not played its held-out tasks by then is given up
    batch_deadline_s: float = 900.0  # a step whose batch does not come by then fails and says for whom it waited
    shown_trajectories_per_step: int = 4  # written for `toolrl show`


@dataclass
class EvalConfig:
    """Evaluation out of distribution (`toolrl eval --ood`, `loop.eval_ood`); see docs/evaluation.md."""

    # What is changed, one after the other: names of variants (or import paths), with their options.
    ood: list[Named] = field(
        default_factory=lambda: [
            Named(name)
            for name in ("renamed_tools", "other_format", "reworded_prompts", "harder_ranges", "tool_failures")
        ]
    )


@dataclass
class PlacementConfig:
    """Who runs where."""

    mode: Literal["disaggregated", "colocated"] = "disaggregated"
    sandbox: Literal["local", "hosts"] = "local"  # in the rollout workers, or on nodes with the Ray resource `sandbox`
    sandbox_hosts: int = 1  # each takes one unit of that resource
    device: Literal["auto", "cpu", "cuda"] = "auto"
    gpus_per_learner_rank: float = 1.0
    ray_address: Optional[str] = None  # HOST:PORT of a cluster, or auto; None: start a local one


@dataclass
class RunConfig:
    """A whole run."""

    name: str = "run"
    # A method's settings by name, laid over the preset and under what is set beside it; `toolrl presets` lists them.
    recipe: Optional[str] = None
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
    critic: CriticConfig = field(default_factory=CriticConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    cold_start: ColdStartConfig = field(default_factory=ColdStartConfig)
    supervision: SupervisionConfig = field(default_factory=SupervisionConfig)
    monitors: MonitorsConfig = field(default_factory=MonitorsConfig)
    guards: GuardsConfig = field(default_factory=GuardsConfig)
    loop: LoopConfig = field(default_factory=LoopConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
