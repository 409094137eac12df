"""Combinations of settings that cannot work, found before anything starts. One small function a rule, all in `CHECKS`.

Each yields a `Problem`: the key to change, what is wrong, what to do. A `warning` is odd but runs. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from toolrl import registered_names
from toolrl.config import RunConfig
from toolrl.config_bounds import out_of_bounds
from toolrl.errors import Problem
from toolrl.registry import nearest

_GROUP_ADVANTAGES = ("grpo", "dr_grpo", "rloo", "gtpo", "gear")


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
        ("algorithm.advantage.name", "advantage", algorithm.advantage.name),
        ("algorithm.policy_loss.name", "policy loss", algorithm.policy_loss.name),
        *((f"algorithm.regularizers.{i}.name", "regulariser", r.name) for i, r in enumerate(algorithm.regularizers)),
    ]
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
        if tool.name in seen:
            yield Problem(f"tools.{index}.name", "this tool is listed twice; remove one", tool.name)
        seen.add(tool.name)


def batch(config: RunConfig) -> Iterator[Problem]:
    samples = config.loop.groups_per_step * config.loop.group_size
    updates, ranks = config.learner.updates_per_batch, config.learner.ranks
    made_of = f"loop.groups_per_step × loop.group_size = {samples} trajectories"
    if samples < updates * ranks:
        message = (
            f"{made_of} cannot feed {updates} updates on {ranks} learner rank(s); at most {max(1, samples // ranks)}"
        )
        yield Problem("learner.updates_per_batch", message, updates)
    elif samples % updates:
        message = f"does not divide {made_of}: the updates differ in size"
        yield Problem("learner.updates_per_batch", message, updates, warning=True)


def groups(config: RunConfig) -> Iterator[Problem]:
    advantage, size = config.algorithm.advantage.name, config.loop.group_size
    if size < 2 and advantage in _GROUP_ADVANTAGES:
        message = f"{advantage} compares the samples of a group and gives a group of one no advantage; at least 2"
        yield Problem("loop.group_size", message, size)


def ratio_moves(config: RunConfig) -> Iterator[Problem]:
    loss = config.algorithm.policy_loss.name
    if loss == "ctpo" and config.learner.updates_per_batch == 1 and config.buffer.max_staleness == 0:
        message = "with one update on fresh data the ratio of ctpo is always 1 and nothing is clipped; set 2 or more"
        yield Problem("learner.updates_per_batch", message, 1, warning=True)


def rewards(config: RunConfig) -> Iterator[Problem]:
    names = [part.name for part in config.rewards.components]
    if not names:
        yield Problem("rewards.components", "nothing is rewarded; name some, e.g. rewards.components=[outcome]", [])
    for name in config.rewards.weights:
        if name not in names:
            message = f"is the weight of a reward that is not among rewards.components{nearest(name, names)}"
            yield Problem(f"rewards.weights.{name}", message, config.rewards.weights[name])
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(f"rewards.components.{index}.name", "this reward is listed twice; use rewards.weights", name)


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


def cold_start(config: RunConfig) -> Iterator[Problem]:
    c = config.cold_start
    if c.min_calls > c.max_calls:
        yield Problem("cold_start.min_calls", f"is more than cold_start.max_calls={c.max_calls}", c.min_calls)
    if c.steps and c.max_calls > config.rollout.max_calls:
        message = f"teaches more calls than rollout.max_calls={config.rollout.max_calls} allows"
        yield Problem("cold_start.max_calls", message, c.max_calls)
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
    if p.mode == "colocated":
        message = "shares the memory of a GPU, and placement.device is cpu; set disaggregated"
        yield Problem("placement.mode", message, p.mode)
    if config.engine.tensor_parallel > 1:
        message = "engines on a CPU use one process; set 1 and raise rollout.workers"
        yield Problem("engine.tensor_parallel", message, config.engine.tensor_parallel)
    if config.weights.transport in ("nccl", "ipc"):
        message = "moves weights between GPUs and placement.device is cpu; set auto"
        yield Problem("weights.transport", message, config.weights.transport)


def colocation(config: RunConfig) -> Iterator[Problem]:
    colocated = config.placement.mode == "colocated"
    engine_gpus = config.rollout.workers * config.engine.tensor_parallel
    if colocated and engine_gpus != config.learner.ranks:
        message = (
            f"colocated, each learner rank shares its GPU with an engine: rollout.workers × engine.tensor_parallel = "
            f"{engine_gpus} must equal learner.ranks"
        )
        yield Problem("learner.ranks", message, config.learner.ranks)
    if colocated and config.engine.tensor_parallel > 1:
        message = "colocated, an engine shares one GPU with one learner rank; set 1 and raise rollout.workers"
        yield Problem("engine.tensor_parallel", message, config.engine.tensor_parallel)
    if colocated and config.engine.gpu_memory_share > 0.7:
        message = "colocated, what the engine takes is missing to the learner on the same GPU; set 0.3 to 0.6"
        yield Problem("engine.gpu_memory_share", message, config.engine.gpu_memory_share)
    if not colocated and config.weights.transport == "ipc":
        message = "hands memory over inside one GPU; with placement.mode=disaggregated set nccl or auto"
        yield Problem("weights.transport", message, "ipc")


def staleness(config: RunConfig) -> Iterator[Problem]:
    groups_there = (config.buffer.max_staleness + 1) * config.loop.groups_per_step
    if groups_there < config.rollout.workers:
        message = f"more than the {groups_there} groups in flight, (max_staleness + 1) batches: some have nothing to do"
        yield Problem("rollout.workers", message, config.rollout.workers, warning=True)


def part_options(config: RunConfig) -> Iterator[Problem]:
    """Options that a part does not take, and those it cannot do without."""
    a = config.algorithm
    parts = [
        ("algorithm.advantage", "advantage", a.advantage),
        ("algorithm.policy_loss", "policy loss", a.policy_loss),
        *((f"algorithm.regularizers.{i}", "regulariser", part) for i, part in enumerate(a.regularizers)),
        *((f"rewards.components.{i}", "reward", part) for i, part in enumerate(config.rewards.components)),
    ]
    if a.correction is not None:
        parts.append(("algorithm.correction", "correction", a.correction))
    for key, kind, part in parts:
        found = registered_names.options(kind, part.name)
        if found is None:
            continue
        taken, required = found
        if kind == "regulariser":  # its weight is the learner's; without one nobody would know how strong it is
            taken, required = taken | {"weight"}, required | {"weight"}
        for option, value in part.options.items():
            if option not in taken:
                told = f"{part.name} has no such option{nearest(option, list(taken)) if taken else '; it takes none'}"
                yield Problem(f"{key}.options.{option}", told, value)
        for option in sorted(required - set(part.options)):
            yield Problem(f"{key}.options.{option}", f"{part.name} needs this option", has_value=False)


CHECKS: list[Callable[[RunConfig], Iterator[Problem]]] = [
    out_of_bounds,
    run_name,
    known_names,
    sampling_distribution,
    lengths,
    calls_fit_turns,
    batch,
    groups,
    ratio_moves,
    rewards,
    tasks,
    learner,
    cold_start,
    device,
    colocation,
    staleness,
    part_options,
]
