"""The range of every number in a config: what it must be at least, at most, or strictly above."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from toolrl.config import RunConfig
from toolrl.errors import Problem

_SHARE = "a share: 0 to 1"
# Key (`*` stands for any list index or free name): lowest, highest, whether the lowest itself is excluded, in words.
# A number that is not listed must be finite and not negative.
BOUNDS: dict[str, tuple[float, float, bool, str]] = {
    "seed": (0, 2**32 - 1, False, "0 to 4294967295"),
    "tasks.families.*.weight": (0, math.inf, True, "above 0; remove a family that is not wanted"),
    "tasks.verifier_processes": (1, math.inf, False, "at least 1"),
    "tasks.verifier_deadline_s": (0, math.inf, True, "above 0"),
    "tools.*.timeout_s": (0, math.inf, True, "above 0"),
    "tools.*.deadline_s": (0, math.inf, True, "above 0"),
    "tools.*.failure_rate": (0, 0.99, False, "a share below 1: 0 to 0.99"),
    "sandbox.max_sessions": (1, math.inf, False, "at least 1"),
    "sandbox.memory_mib": (32, math.inf, False, "at least 32"),
    "sandbox.max_output_bytes": (256, math.inf, False, "at least 256"),
    "placement.sandbox_hosts": (1, math.inf, False, "at least 1"),
    "rollout.workers": (1, math.inf, False, "at least 1"),
    "rollout.concurrency": (1, math.inf, False, "at least 1"),
    "rollout.temperature": (
        0,
        2,
        True,
        "above 0 (greedy samples have no distribution to train) and at most 2 (vLLM's limit)",
    ),
    "rollout.max_turns": (1, math.inf, False, "at least 1"),
    "rollout.max_calls_per_turn": (1, math.inf, False, "at least 1"),
    "rollout.max_turn_tokens": (1, math.inf, False, "at least 1"),
    "rollout.max_response_tokens": (1, math.inf, False, "at least 1"),
    "rollout.max_context_tokens": (2, math.inf, False, "at least 2"),
    "rollout.max_observation_tokens": (1, math.inf, False, "at least 1"),
    "rollout.pending_deadline_s": (0, math.inf, True, "above 0"),
    "rollout.lease_s": (1, math.inf, False, "at least 1"),
    "engine.tensor_parallel": (1, math.inf, False, "at least 1"),
    "engine.pipeline_parallel": (1, math.inf, False, "at least 1"),
    "engine.nodes": (1, math.inf, False, "at least 1"),
    "engine.kv_cache_gib": (0, math.inf, True, "above 0"),
    "engine.gpu_memory_share": (0.05, 0.98, False, "0.05 to 0.98"),
    "engine.max_concurrent_requests": (1, math.inf, False, "at least 1"),
    "engine.sleep_level": (1, 2, False, "1 or 2"),
    "engine.cpu_threads": (1, math.inf, False, "at least 1"),
    "engine.start_deadline_s": (1, math.inf, False, "at least 1"),
    "buffer.max_refills": (1, math.inf, False, "at least 1; buffer.drop_uniform_groups=false keeps every group"),
    "buffer.max_attempts": (1, math.inf, False, "at least 1"),
    "buffer.learner_lease_s": (1, math.inf, False, "at least 1"),
    "rewards.weights.*": (-math.inf, math.inf, False, "finite"),
    "rewards.deadline_s": (0, math.inf, True, "above 0"),
    "rewards.late.deadline_s": (0, math.inf, True, "above 0"),
    "rewards.late.http_port": (0, 65535, False, "0 (a free one) to 65535"),
    "learner.ranks": (1, math.inf, False, "at least 1"),
    "learner.zero_stage": (0, 3, False, "0, 1, 2 or 3"),
    "learner.learning_rate": (0, 1, True, "above 0 and at most 1"),
    "learner.betas.*": (0, 0.999999, False, "0 to below 1"),
    "learner.gradient_clip": (0, math.inf, True, "above 0; use a large number to switch clipping off"),
    "learner.updates_per_batch": (1, math.inf, False, "at least 1"),
    "learner.tokens_per_micro_batch": (1, math.inf, False, "at least 1"),
    "learner.logprob_chunk_tokens": (1, math.inf, False, "at least 1"),
    "learner.sequence_parallel": (1, math.inf, False, "at least 1; 1 gives every rank rows of its own"),
    "learner.cpu_threads": (1, math.inf, False, "at least 1"),
    "learner.step_deadline_s": (1, math.inf, False, "at least 1"),
    "critic.learning_rate": (0, 1, True, "above 0 and at most 1"),
    "critic.gradient_clip": (0, math.inf, True, "above 0; use a large number to switch clipping off"),
    "critic.value_clip": (0, math.inf, True, "above 0; null switches clipping off"),
    "critic.loss_weight": (0, math.inf, True, "above 0"),
    "weights.deadline_s": (1, math.inf, False, "at least 1"),
    "weights.bucket_mib": (1, 1 << 16, False, "1 to 65536"),
    "cold_start.traces": (1, math.inf, False, "at least 1"),
    "cold_start.batch_size": (1, math.inf, False, "at least 1"),
    "cold_start.learning_rate": (0, 1, True, "above 0 and at most 1"),
    "cold_start.direct_guess_share": (0, 1, False, _SHARE),
    "cold_start.malformed_call_share": (0, 1, False, _SHARE),
    "cold_start.wrong_code_share": (0, 1, False, _SHARE),
    "cold_start.retry_share": (0, 1, False, _SHARE),
    "guards.rules.*.threshold": (-math.inf, math.inf, False, "finite"),
    "guards.rules.*.release": (-math.inf, math.inf, False, "finite"),
    "guards.rules.*.window": (1, math.inf, False, "at least 1"),
    "guards.rules.*.hold": (1, math.inf, False, "at least 1"),
    "guards.rules.*.follow_up_steps": (1, math.inf, False, "at least 1"),
    "supervision.references.max_tasks": (1, math.inf, False, "at least 1"),
    "supervision.erroneous.max_references": (1, math.inf, False, "at least 1"),
    "supervision.erroneous.learning_rate": (0, 1, True, "above 0 and at most 1"),
    "supervision.interleaved.batch_size": (1, math.inf, False, "at least 1"),
    "supervision.interleaved.learning_rate": (0, 1, True, "above 0 and at most 1"),
    "supervision.reflection.temperature": (0, 2, False, "0 to 2, or null for the endpoint's"),
    "supervision.reflection.max_tokens": (1, math.inf, False, "at least 1, or null for the endpoint's"),
    "supervision.reflection.retries": (0, 10, False, "0 to 10"),
    "supervision.reflection.deadline_s": (0, math.inf, True, "above 0"),
    "supervision.reflection.concurrency": (1, math.inf, False, "at least 1"),
    "supervision.reflection.queue": (1, math.inf, False, "at least 1"),
    "supervision.reflection.every_steps": (1, math.inf, False, "at least 1; critic=null switches reflection off"),
    "supervision.reflection.trajectories_per_step": (1, math.inf, False, "at least 1"),
    "supervision.reflection.steps": (1, math.inf, False, "at least 1"),
    "supervision.reflection.batch_size": (1, math.inf, False, "at least 1"),
    "supervision.reflection.learning_rate": (0, 1, True, "above 0 and at most 1"),
    "loop.steps": (1, math.inf, False, "at least 1: a run that trains nothing is an error"),
    "loop.groups_per_step": (1, math.inf, False, "at least 1"),
    "loop.group_size": (1, math.inf, False, "at least 1"),
    "loop.checkpoint_every_steps": (0, math.inf, False, "0 (only at the end) or more"),
    "loop.keep_checkpoints": (1, math.inf, False, "at least 1"),
    "loop.eval_samples": (1, math.inf, False, "at least 1"),
    "loop.batch_deadline_s": (1, math.inf, False, "at least 1"),
    "loop.eval_deadline_s": (1, math.inf, False, "at least 1"),
}
_DEFAULT = (0.0, math.inf, False, "0 or more")
# Negative values have a meaning here, or values are the part's own.
_FREE = ("rollout.top_k", "rollout.top_p")


def out_of_bounds(config: RunConfig) -> Iterator[Problem]:
    """A problem for each number outside its range."""
    for key, pattern, value in _numbers(config, "", ""):
        if ".options." in f"{key}." or ".extra_body." in key or pattern in _FREE or key.startswith("learner.deepspeed"):
            continue
        low, high, exclusive, words = BOUNDS.get(pattern, _DEFAULT)
        if not math.isfinite(value) or value < low or value > high or (exclusive and value == low):
            yield Problem(key, f"must be {words}", value)


def _numbers(node: Any, key: str, pattern: str) -> Iterator[tuple[str, str, float]]:
    """(full key, key with `*` for free parts, number) of everything below a node."""
    if is_dataclass(node):
        children = [(field.name, field.name, getattr(node, field.name)) for field in fields(node)]
    elif isinstance(node, dict):
        children = [(str(name), "*", item) for name, item in node.items()]
    elif isinstance(node, list):
        children = [(str(index), "*", item) for index, item in enumerate(node)]
    else:
        if isinstance(node, (int, float)) and not isinstance(node, bool):
            yield key, pattern, float(node) if isinstance(node, float) else node
        return
    for name, generic, item in children:
        yield from _numbers(item, f"{key}.{name}".lstrip("."), f"{pattern}.{generic}".lstrip("."))
