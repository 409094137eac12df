"""What every test needs before torch is imported; and that a test whose process had to be ended is a failure."""

import hashlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# One thread a process: the tests run beside engines and learner ranks on few cores, and small tensors gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No test is about time: on a busy machine any example may take long.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")


def _mark(item: pytest.Item) -> Path | None:
    """A file that is there while the test runs, in a session of several processes."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    name = f"pytest-{session}-{hashlib.sha256(item.nodeid.encode()).hexdigest()[:16]}"
    return Path(tempfile.gettempdir()) / name if session else None


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """xdist gives a test that took its process with it (`faulthandler_exit_on_timeout`) to the next process, and so on for
    ever: the second time it fails."""
    if mark := _mark(item):
        if mark.exists():
            pytest.fail("its process died or hung and was ended; the stacks are above", pytrace=False)
        mark.touch()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    try:
        return (yield)
    finally:
        if mark := _mark(item):
            mark.unlink(missing_ok=True)
