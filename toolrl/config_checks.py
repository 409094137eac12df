"""Combinations of settings that cannot work, found before anything starts. One small function a rule, all in `CHECKS`.

Each yields a `Problem`: the key to change, what is wrong, what to do. A `warning` is odd but runs. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from toolrl import (
    config_algorithm_checks,
    config_evaluation_checks,
    config_guard_checks,
    config_model_rewards,
    config_option_checks,
    config_reward_checks,
    registered_names,
)
from toolrl.config import RunConfig
from toolrl.config_adapter_checks import adapter_problems
from toolrl.config_bounds import out_of_bounds
from toolrl.config_cluster_checks import cluster_problems
from toolrl.config_cold_start_checks import dense_cold_start_problems
from toolrl.config_deepspeed import deepspeed_problems
from toolrl.config_sequence_parallel import sequence_parallel_problems
from toolrl.config_supervision_checks import SUPERVISION_CHECKS
from toolrl.errors import Problem
from toolrl.registry import nearest
from toolrl.weight_transport import transport_problems


def problems(config: RunConfig) -> list[Problem]:
    """Everything wrong or odd about the config."""
    return [problem for check in CHECKS for problem in check(config)]


def run_name(config: RunConfig) -> Iterator[Problem]:
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", config.name):
        yield Problem("name", "names a folder: use letters, digits, '.', '_' and '-'", config.name)


def known_names(config: RunConfig) -> Iterator[Problem]:
    """Parts that no registry holds. `module:attribute` and `vllm:NAME` are looked up when they are loaded."""
    algorithm = config.algorithm
    named = [
        ("rollout.parser", "tool-call parser", config.rollout.parser),
        ("tasks.kind", "task source", config.tasks.kind),
        *((f"tools.{i}.name", "tool", tool.name) for i, tool in enumerate(config.tools)),
        *((f"rewards.components.{i}.name", "reward", part.name) for i, part in enumerate(config.rewards.components)),
        *((f"eval.ood.{i}.name", "evaluation variant", part.name) for i, part in enumerate(config.eval.ood)),
        ("algorithm.advantage.name", "advantage", algorithm.advantage.name),
        ("algorithm.policy_loss.name", "policy loss", algorithm.policy_loss.name),
        *((f"algorithm.regularizers.{i}.name", "regulariser", r.name) for i, r in enumerate(algorithm.regularizers)),
    ]
    if config.supervision.reflection.critic is not None:
        named.append(("supervision.reflection.critic", "critic", config.supervision.reflection.critic))
    if algorithm.correction is not None:
        named.append(("algorithm.correction.name", "correction", algorithm.correction.name))
    for key, kind, name in named:
        known = registered_names.registered(kind)
        if ":" not in name and name not in known:
            yield Problem(key, f"unknown {kind}{nearest(name, list(known))}, or an import path module:attribute", name)


def sampling_distribution(config: RunConfig) -> Iterator[Problem]:
    why = "the learner's log-probabilities are those of the whole distribution, so samples must be drawn from it"
    if config.rollout.top_p != 1.0:
        yield Problem("rollout.top_p", f"must be 1.0: {why}", config.rollout.top_p)
    if config.rollout.top_k > 0:
        yield Problem("rollout.top_k", f"must be -1 (off): {why}", config.rollout.top_k)


def lengths(config: RunConfig) -> Iterator[Problem]:
    r = config.rollout
    if r.max_response_tokens >= r.max_context_tokens:
        message = f"leaves no room for a prompt in rollout.max_context_tokens={r.max_context_tokens}; raise that"
        yield Problem("rollout.max_response_tokens", message, r.max_response_tokens)
    for key in ("max_turn_tokens", "max_observation_tokens"):
        if getattr(r, key) > r.max_response_tokens:
            message = f"is more than rollout.max_response_tokens={r.max_response_tokens}, which it counts towards"
            yield Problem(f"rollout.{key}", message, getattr(r, key))
    if config.learner.tokens_per_micro_batch < r.max_context_tokens:
        message = f"cannot hold the longest sequence; at least rollout.max_context_tokens={r.max_context_tokens}"
        yield Problem("learner.tokens_per_micro_batch", message, config.learner.tokens_per_micro_batch)
    served = config.engine.options.get("max_model_len")
    if isinstance(served, int) and served < r.max_context_tokens:
        message = f"is less than rollout.max_context_tokens={r.max_context_tokens}; remove it to follow that"
        yield Problem("engine.options.max_model_len", message, served)


def calls_fit_turns(config: RunConfig) -> Iterator[Problem]:
    if config.tools and config.rollout.max_calls > 0 and config.rollout.max_turns < 2:
        yield Problem("rollout.max_turns", "an episode with a call needs a second turn to answer; at least 2", 1)
    if not config.tools:
        message = "no tools: the policy is trained to answer in one turn; name some, e.g. tools=[python]"
        yield Problem("tools", message, has_value=False, warning=True)
    seen: set[str] = set()
    for index, tool in enumerate(config.tools):
        if tool.name in seen and tool.name != "mcp":  # each entry may be another server
            yield Problem(f"tools.{index}.name", "this tool is listed twice; remove one", tool.name)
        seen.add(tool.name)


def late_results(config: RunConfig) -> Iterator[Problem]:
    rewarded = {part.name for part in config.rewards.components}
    for index, tool in enumerate(config.tools):
        if tool.deadline_s is not None and tool.deadline_s >= tool.timeout_s and tool.name not in ("python", "mcp"):
            message = (
                f"never binds: a call is ended after tools.{index}.timeout_s={tool.timeout_s:g}; set less, or null"
            )
            yield Problem(f"tools.{index}.deadline_s", message, tool.deadline_s)
        if tool.deadline_s is not None and "timeout" not in rewarded:
            message = "a call that passes it costs nothing; add the reward: rewards.components=[…, timeout]"
            yield Problem(f"tools.{index}.deadline_s", message, tool.deadline_s, warning=True)
        if tool.mode == "deferred" and config.rollout.max_turns < 3:
            message = (
                "call, meanwhile and late result need turns of their own: rollout.max_turns="
                f"{config.rollout.max_turns} leaves none to use the result; set 3 or more, or mode=await"
            )
            yield Problem(f"tools.{index}.mode", message, tool.mode)


def batch(config: RunConfig) -> Iterator[Problem]:
    samples = config.loop.groups_per_step * config.loop.group_size
    updates, ranks = config.learner.updates_per_batch, config.learner.ranks // max(1, config.learner.sequence_parallel)
    made_of = f"loop.groups_per_step × loop.group_size = {samples} trajectories"
    if samples < updates * ranks:
        message = (
            f"{made_of} cannot feed {updates} updates on {ranks} learner rank(s); at most {max(1, samples // ranks)}"
        )
        yield Problem("learner.updates_per_batch", message, updates)
    elif samples % updates:
        message = f"does not divide {made_of}: the updates differ in size"
        yield Problem("learner.updates_per_batch", message, updates, warning=True)


def critic(config: RunConfig) -> Iterator[Problem]:
    """An advantage that reads values needs a critic, and a critic a reader. Import paths are asked when they are loaded."""
    advantage, c = config.algorithm.advantage.name, config.critic
    reads_values = registered_names.evidence(advantage) == "values"
    if reads_values and c.kind == "none":
        message = f"{advantage} reads the value of every turn: set shared (a head on the policy's backbone) or own"
        yield Problem("critic.kind", message, c.kind)
    if not reads_values and ":" not in advantage and c.kind != "none":
        message = f"{advantage} reads no values, so the critic would be trained for nothing; set none, or steppo"
        yield Problem("critic.kind", message, c.kind)
    if c.kind != "own" and c.model is not None:
        yield Problem("critic.model", f"belongs to critic.kind=own, not {c.kind}; remove it", c.model)
    elif c.model is not None and not (Path(c.model) / "config.json").is_file():
        yield Problem("critic.model", "is no folder in Hugging Face format (there is no config.json)", c.model)
    if c.kind != "shared" and c.backbone_gradient:
        yield Problem("critic.backbone_gradient", f"belongs to critic.kind=shared, not {c.kind}; remove it", True)
    if c.kind != "none" and c.warmup_steps >= config.loop.steps:
        message = f"the critic's warm-up would fill the whole run of loop.steps={config.loop.steps}"
        yield Problem("critic.warmup_steps", message, c.warmup_steps)


def rewards(config: RunConfig) -> Iterator[Problem]:
    names = [part.name for part in config.rewards.components]
    known = [*names, *config.rewards.late.names]
    if not known:
        yield Problem("rewards.components", "nothing is rewarded; name some, e.g. rewards.components=[outcome]", [])
    for name in config.rewards.weights:
        if name not in known:
            message = f"is the weight of a reward that is not among rewards.components{nearest(name, known)}"
            yield Problem(f"rewards.weights.{name}", message, config.rewards.weights[name])
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"rewards.components.{index}.name", "this reward is listed twice; use rewards.weights", name)
    yield from late_rewards(config, names)


def late_rewards(config: RunConfig, components: list[str]) -> Iterator[Problem]:
    late, patience_s = config.rewards.late, config.loop.batch_deadline_s / 2
    for index, name in enumerate(late.names):
        if name in components or name in late.names[:index]:
            yield Problem(f"rewards.late.names.{index}", "this reward is listed twice; remove one of them", name)
    if late.names and late.deadline_s > patience_s:
        message = f"the learner goes on without what has not come after loop.batch_deadline_s / 2 = {patience_s:g} s"
        yield Problem("rewards.late.deadline_s", message, late.deadline_s, warning=True)
    if not late.bootstrap:
        return
    advantage = config.algorithm.advantage.name
    if config.critic.kind == "none":
        message = "puts the critic's values in place of rewards and there is no critic; set critic.kind, or false"
        yield Problem("rewards.late.bootstrap", message, True)
    elif advantage != "lambda_return" and ":" not in advantage:
        message = f"{advantage} takes a missing reward for 0; set algorithm.advantage=lambda_return, or false"
        yield Problem("rewards.late.bootstrap", message, True)
    if config.buffer.drop_uniform_groups:
        message = "compares rewards of a group, and with rewards.late.bootstrap some are not there yet; set false"
        yield Problem("buffer.drop_uniform_groups", message, True)


def tasks(config: RunConfig) -> Iterator[Problem]:
    t = config.tasks
    if t.kind == "reasoning_gym":
        if not t.families:
            message = "name at least one task family, e.g. tasks.families=[chain_sum, gcd]"
            yield Problem("tasks.families", message, has_value=False)
        known = registered_names.reasoning_gym_families()
        for index, family in enumerate(t.families):
            if known and family.name not in known:
                close = nearest(family.name, list(known)) if len(nearest(family.name, list(known))) < 80 else ""
                message = f"reasoning_gym has no such family{close}"
                yield Problem(f"tasks.families.{index}.name", message, family.name)
    elif t.families:
        yield Problem(
            "tasks.families", f"belong to tasks.kind=reasoning_gym, not {t.kind}; remove them", has_value=False
        )
    if t.kind in ("rows", "hub") and not t.path:
        what = "a JSONL or Parquet file" if t.kind == "rows" else "a dataset name on the Hugging Face hub"
        yield Problem("tasks.path", f"tasks.kind={t.kind} needs {what}", t.path)
    elif t.kind == "rows" and not Path(str(t.path)).exists():
        yield Problem("tasks.path", "no such file", t.path)


def learner(config: RunConfig) -> Iterator[Problem]:
    chosen = config.learner
    if len(chosen.betas) != 2:
        yield Problem("learner.betas", "must be two numbers, e.g. [0.9, 0.999]", chosen.betas)
    if chosen.offload and chosen.zero_stage == 0:
        yield Problem(
            "learner.offload", "needs learner.zero_stage=1 or higher: stage 0 does not split the optimiser", True
        )
    if chosen.schedule != "constant" and chosen.warmup_steps >= config.loop.steps:
        message = f"the warm-up would fill the whole run of loop.steps={config.loop.steps}"
        yield Problem("learner.warmup_steps", message, chosen.warmup_steps)


def deepspeed(config: RunConfig) -> Iterator[Problem]:
    yield from deepspeed_problems(config.learner)


def sequence_parallel(config: RunConfig) -> Iterator[Problem]:
    yield from sequence_parallel_problems(config)


def trained_weights(config: RunConfig) -> Iterator[Problem]:
    yield from adapter_problems(config)
    if config.learner.offload_reference and config.placement.device == "cpu":
        message = "changes nothing on a CPU: the reference model is in the host's memory anyway"
        yield Problem("learner.offload_reference", message, True, warning=True)


def cold_start(config: RunConfig) -> Iterator[Problem]:
    c = config.cold_start
    if c.min_calls > c.max_calls:
        yield Problem("cold_start.min_calls", f"is more than cold_start.max_calls={c.max_calls}", c.min_calls)
    if c.steps and c.max_calls > config.rollout.max_calls:
        message = f"teaches more calls than rollout.max_calls={config.rollout.max_calls} allows"
        yield Problem("cold_start.max_calls", message, c.max_calls)
    yield from dense_cold_start_problems(config)
    shares = c.direct_guess_share + c.malformed_call_share + c.wrong_code_share
    if shares > 1.0 + 1e-9:
        message = f"the shares of direct guesses, malformed calls and wrong code add up to {shares:g}, more than 1"
        yield Problem("cold_start.direct_guess_share", message, c.direct_guess_share)
    if c.traces_path and not Path(c.traces_path).exists():
        yield Problem("cold_start.traces_path", "no such file", c.traces_path)


def device(config: RunConfig) -> Iterator[Problem]:
    """Rules for a device that is chosen; `auto` is resolved, and checked again, by `toolrl.placement`."""
    p = config.placement
    if p.device != "cpu":
        return
    if config.model.dtype == "bfloat16":
        message = "engine and learner disagree too much in bfloat16 on a CPU (ratios drift from 1); set float32"
        yield Problem("model.dtype", message, config.model.dtype)
    if config.engine.tensor_parallel > 1:
        message = "on a CPU more processes an engine are slower than more engines; set 1 and raise rollout.workers"
        yield Problem("engine.tensor_parallel", message, config.engine.tensor_parallel, warning=True)
    if config.engine.pipeline_parallel > 1:
        message = "vLLM's CPU backend (0.32) dies at the first request of an engine in stages; set 1"
        yield Problem("engine.pipeline_parallel", message, config.engine.pipeline_parallel)
    if config.weights.transport in ("nccl", "ipc"):
        message = "moves weights between GPUs and placement.device is cpu; set auto, or gloo"
        yield Problem("weights.transport", message, config.weights.transport)


def engine_nodes(config: RunConfig) -> Iterator[Problem]:
    engine = config.engine
    processes = engine.tensor_parallel * engine.pipeline_parallel
    if processes % engine.nodes:
        message = (
            f"must divide engine.tensor_parallel × engine.pipeline_parallel = {processes}: nodes have equal shares"
        )
        yield Problem("engine.nodes", message, engine.nodes)
    if engine.nodes > 1 and config.model.lora.rank and config.model.lora.publish == "adapter":
        message = "an adapter by itself reaches one node only; set model.lora.publish=merged, or 1"
        yield Problem("engine.nodes", message, engine.nodes)
    if engine.nodes > 1 and config.weights.transport == "gloo":
        message = "weights over gloo reach one node only; set weights.transport=auto, or 1"
        yield Problem("engine.nodes", message, engine.nodes)


def colocation(config: RunConfig) -> Iterator[Problem]:
    colocated = config.placement.mode == "colocated"
    engine_gpus = config.rollout.workers * config.engine.tensor_parallel
    if colocated and engine_gpus != config.learner.ranks:
        message = (
            f"colocated, each learner rank shares its GPU with an engine: rollout.workers × engine.tensor_parallel = "
            f"{engine_gpus} must equal learner.ranks"
        )
        yield Problem("learner.ranks", message, config.learner.ranks)
    for name in ("tensor_parallel", "pipeline_parallel"):
        if colocated and getattr(config.engine, name) > 1:
            message = "colocated, an engine shares one GPU with one learner rank; set 1 and raise rollout.workers"
            yield Problem(f"engine.{name}", message, getattr(config.engine, name))
    # The learner's weights stay there while engines generate; its other state too, unless it makes room.
    most = 0.7 if config.learner.offload_while_generating == "never" else 0.85
    if colocated and config.placement.device != "cpu" and config.engine.gpu_memory_share > most:
        message = f"colocated, the learner keeps a part of the GPU while engines generate; at most {most:g}"
        if most < 0.85:
            message += ", or 0.85 with learner.offload_while_generating=auto"
        yield Problem("engine.gpu_memory_share", message, config.engine.gpu_memory_share)
    if not colocated and config.learner.offload_while_generating == "always":
        message = "makes room for engines on the same GPU; with placement.mode=disaggregated set auto"
        yield Problem("learner.offload_while_generating", message, "always")


def transport(config: RunConfig) -> Iterator[Problem]:
    yield from transport_problems(config)


def staleness(config: RunConfig) -> Iterator[Problem]:
    groups_there = (config.buffer.max_staleness + 1) * config.loop.groups_per_step
    if groups_there < config.rollout.workers:
        message = f"more than the {groups_there} groups in flight, (max_staleness + 1) batches: some have nothing to do"
        yield Problem("rollout.workers", message, config.rollout.workers, warning=True)


CHECKS: list[Callable[[RunConfig], Iterator[Problem]]] = [
    out_of_bounds,
    run_name,
    known_names,
    sampling_distribution,
    lengths,
    calls_fit_turns,
    late_results,
    batch,
    critic,
    rewards,
    tasks,
    learner,
    deepspeed,
    sequence_parallel,
    trained_weights,
    cold_start,
    device,
    engine_nodes,
    colocation,
    transport,
    staleness,
    *config_option_checks.CHECKS,
    *config_reward_checks.CHECKS,
    *config_model_rewards.CHECKS,
    *config_algorithm_checks.CHECKS,
    *SUPERVISION_CHECKS,
    *config_guard_checks.CHECKS,
    *config_evaluation_checks.CHECKS,
    cluster_problems,
]
