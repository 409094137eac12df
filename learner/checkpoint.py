"""Checkpoints of a rank: DeepSpeed's own files for model and optimiser, and beside them each rank's random states and
counters.

A checkpoint is complete when `complete.json` is there: it is written last, after all ranks are done, and loading
refuses a folder without it. Schedules are functions of the step counter and need nothing saved.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

TAG = "state"
COMPLETE = "complete.json"
REFERENCE = "reference.pt"


def save_checkpoint(
    engine: Any,
    folder: Path,
    counters: dict[str, int],
    reference: dict[str, torch.Tensor] | None = None,
    *,
    rank: int,
    world: int,
) -> None:
    """Collective; `counters` is what the rank counts, `reference` the weights of a reference model that are kept nowhere else."""
    folder.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        (folder / COMPLETE).unlink(missing_ok=True)
        (folder / REFERENCE).unlink(missing_ok=True)
        if reference is not None:
            torch.save(reference, folder / REFERENCE)
    engine.save_checkpoint(str(folder), tag=TAG)
    torch.save(_random_states(), folder / f"random_rank{rank}.pt")
    if world > 1:
        torch.distributed.barrier()
    if rank == 0:
        draft = folder / f"{COMPLETE}.draft"
        facts = {"world": world, "zero_stage": int(engine.zero_optimization_stage()), "counters": counters}
        draft.write_text(json.dumps(facts), encoding="utf-8")
        os.replace(draft, folder / COMPLETE)
    if world > 1:
        torch.distributed.barrier()


def has_reference(folder: Path) -> bool:
    return (folder / REFERENCE).exists()


def load_checkpoint(
    engine: Any, folder: Path, reference: torch.nn.Module | None = None, *, rank: int, world: int
) -> dict[str, int]:
    """Collective; the counters that were saved. `reference` gets its weights too where they are in the folder.

    Raises:
        ValueError: the folder holds no complete checkpoint, or one of another number of ranks or another ZeRO stage.
    """
    complete = folder / COMPLETE
    if not complete.exists():
        raise ValueError(f"checkpoint {folder}: {COMPLETE} is missing, so it was never finished; take an older one")
    facts = json.loads(complete.read_text(encoding="utf-8"))
    here = {"world": world, "zero_stage": int(engine.zero_optimization_stage())}
    for name, value in here.items():
        if facts[name] != value:
            raise ValueError(
                f"checkpoint {folder} was saved with {name} = {facts[name]}, this learner has {value}; "
                "start it with the same number of ranks and ZeRO stage, or from an exported model"
            )
    engine.load_checkpoint(str(folder), tag=TAG)
    if reference is not None and has_reference(folder):
        reference.load_state_dict(torch.load(folder / REFERENCE, map_location="cpu"))
    _restore(torch.load(folder / f"random_rank{rank}.pt", weights_only=False))
    counters: dict[str, int] = facts["counters"]
    return counters


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
