"""A short soak: what `benchmarks/sandbox_soak.py` does with 10,000 episodes, with as many as CI has time for."""

from __future__ import annotations

import pytest

from benchmarks.sandbox_soak import soak
from tests.requirements import need


@pytest.mark.docker
@pytest.mark.slow
async def test_five_hundred_episodes_leave_nothing_and_do_not_slow_down():
    need("docker")
    report = await soak(500)
    assert report.leaks == [] and report.wrong == [] and report.orphans == []
    assert report.broken == []
    assert report.hostile > 150 and len(report.statuses) >= 5 and report.boxes_at_most <= 12
    # A percentile of a short run on a busy machine is noise; a drift of the median is not.
    assert report.p50_ms_last < 3 * report.p50_ms_first + 2


async def test_the_process_backend_stands_a_soak_too():
    need("bubblewrap")
    report = await soak(60, "process", seed=1)
    assert report.leaks == [] and report.wrong == [] and report.orphans == [], report
