"""Metrics reach the real wandb client, in its offline mode."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.requirements import need

need("wandb")

from toolrl.monitors.wandb_log import WandbLog


def test_a_run_and_its_continuation_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for steps in ((1, 2), (2, 3)):  # killed after step 2, resumed from step 1's checkpoint
        log = WandbLog("toolrl-tests", tmp_path, {"seed": 0})
        for step in steps:
            log.write(step, step, {"reward/mean": 0.1 * step})
        log.close()
    written = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert written
    assert any(b"reward/mean" in file.read_bytes() for file in written)
