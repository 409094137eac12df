"""Checkpoints of a rank: DeepSpeed's own files for model and optimiser, and beside them each rank's random states and
counters.

A checkpoint is complete when `complete.json` is there: it is written last, after all ranks are done, and loading
refuses a folder without it. Schedules are functions of the step counter and need nothing saved. With an adapter only
its weights and its optimiser are saved, and a fingerprint of the model below it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from learner import lora
from learner.reference import FILE as REFERENCE
from learner.reference import Reference
from learner.weight_source import WeightSource
from toolrl.config import LoraConfig

TAG = "state"
COMPLETE = "complete.json"
CRITIC = "critic.pt"


def save_checkpoint(
    engine: Any,
    folder: Path,
    counters: dict[str, int],
    reference: Reference | None = None,
    critic: dict[str, Any] | None = None,
    *,
    adapter: dict[str, Any] | None = None,
    rank: int,
    world: int,
) -> None:
    """Collective; `counters` is what the rank counts, `critic` what a critic must know to go on, the same on every rank,
    `adapter` the facts of the adapter that is trained (`adapter_facts`)."""
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        for name in (COMPLETE, REFERENCE, CRITIC):
            (folder / name).unlink(missing_ok=True)
        if critic is not None:
            torch.save(critic, folder / CRITIC)
    if reference is not None:
        reference.save(folder, rank)
    engine.save_checkpoint(str(folder), tag=TAG, exclude_frozen_parameters=adapter is not None)
    torch.save(_random_states(), folder / f"random_rank{rank}.pt")
    if world > 1:
        torch.distributed.barrier()
    if rank == 0:
        draft = folder / f"{COMPLETE}.draft"
        draft.write_text(json.dumps(_facts(engine, adapter, world) | {"counters": counters}), encoding="utf-8")
        os.replace(draft, folder / COMPLETE)
    if world > 1:
        torch.distributed.barrier()


def adapter_facts(causal_lm: Any, config: LoraConfig) -> dict[str, Any] | None:
    """What must be the same for an adapter to be loaded; None without one. Collective, and reads the whole model."""
    if not config.rank:
        return None
    sums = WeightSource(causal_lm, base=True).checksums()
    base = hashlib.sha256("\n".join(f"{name} {sums[name]}" for name in sorted(sums)).encode()).hexdigest()
    return {"rank": config.rank, "alpha": config.alpha, "layers": sorted(lora.layers(causal_lm)), "base": base}


def load_critic(folder: Path) -> dict[str, Any]:
    """Raises ValueError where a checkpoint was saved without a critic."""
    if not (folder / CRITIC).exists():
        raise ValueError(f"checkpoint {folder} was saved without a critic; continue it with critic.kind=none")
    found: dict[str, Any] = torch.load(folder / CRITIC, map_location="cpu")
    return found


def load_checkpoint(
    engine: Any,
    folder: Path,
    reference: Reference | None = None,
    *,
    adapter: dict[str, Any] | None = None,
    rank: int,
    world: int,
) -> dict[str, int]:
    """Collective; the counters that were saved. `reference` gets its weights too where they are in the folder.

    Raises:
        ValueError: the folder holds no complete checkpoint, or one of another number of ranks, another ZeRO stage, another
            adapter, or an adapter of another model.
    """
    complete = folder / COMPLETE
    if not complete.exists():
        raise ValueError(f"checkpoint {folder}: {COMPLETE} is missing, so it was never finished; take an older one")
    facts = json.loads(complete.read_text(encoding="utf-8"))
    for name, value in _facts(engine, adapter, world).items():
        if facts.get(name) != value:
            raise ValueError(f"checkpoint {folder} {_difference(name, facts.get(name), value)}")
    engine.load_checkpoint(str(folder), tag=TAG, load_module_strict=adapter is None)
    if reference is not None:
        reference.load(folder)
    _restore(torch.load(folder / f"random_rank{rank}.pt", weights_only=False))
    counters: dict[str, int] = facts["counters"]
    return counters


def _facts(engine: Any, adapter: dict[str, Any] | None, world: int) -> dict[str, Any]:
    return {"world": world, "zero_stage": int(engine.zero_optimization_stage()), "adapter": adapter}


def _difference(name: str, saved: Any, here: Any) -> str:
    if name != "adapter":
        return (
            f"was saved with {name} = {saved}, this learner has {here}; "
            "start it with the same number of ranks and ZeRO stage, or from an exported model"
        )
    if saved is None or here is None:
        with_one, without = ("was saved with", "has none") if here is None else ("was saved without", "has one")
        return f"{with_one} an adapter (model.lora), this learner {without}; set model.lora.rank as it was"
    part = next(key for key in here if saved.get(key) != here[key])
    if part == "base":
        return "holds an adapter of another model; load the model that it was trained on"
    return f"holds an adapter with other {part} than model.lora gives; set {part} as it was"


def _random_states() -> dict[str, Any]:
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def _restore(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state(states["cuda"])
