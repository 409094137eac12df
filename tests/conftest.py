"""What every test needs before torch is imported; and how a test that takes its process with it fails, once."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import settings

# One thread a process: the tests run beside engines and learner ranks on few cores, and small tensors gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Ray is polite (15): beside tests that compute, its workers and their engines would get a thirtieth of a core, or none in time.
os.environ.setdefault("RAY_worker_niceness", "0")

# No test is about time: on a busy machine any example may take long.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's own for `--dist loadfile` hands everything that a dead process ever had to the others again: the test that it
    died of, and files that are done, over which it waits for ever."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Files(LoadFileScheduling):
        def remove_node(self, node: Any) -> str | None:
            had = self.assigned_work[node]
            fatal = next((test for file in had.values() for test, done in file.items() if not done), None)
            for name, file in list(had.items()):
                if fatal in file:
                    file[fatal] = True
                if all(file.values()):
                    del had[name]
            super().remove_node(node)
            return fatal

    return Files(config, log)
