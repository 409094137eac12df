"""The sides of `toolrl bench learner` that need no other environment: the learner really makes the padded loop's update."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.requirements import need

need("deepspeed", "torch", "transformers")

from benchmarks import learner
from benchmarks.sides.cases import Case
from benchmarks.sides.process import Side
from toolrl.app.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Side]]:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_model(folder, 0)
    started = {"learner": Side("ours", str(folder)), "padded": Side("padded", str(folder))}
    for side in started.values():
        side.wait_until_up()
    yield started
    for side in started.values():
        side.stop()


@pytest.mark.parametrize("case", [Case(50, 1, 1), Case(50, 2, 2)], ids=["one update", "two updates"])
def test_the_learner_and_the_padded_loop_make_the_same_update_in_processes_of_their_own(
    sides: dict[str, Side], case: Case
) -> None:
    for side in sides.values():
        side.ask(case=asdict(case), rounds=1)
    turn = {name: side.ask(do="step") for name, side in sides.items()}
    turn["floor"] = sides["learner"].ask(do="floor")
    norms = {name: found["norm"] for name, found in turn.items()}
    learner.check_norms(norms | {"TRL": norms["learner"]}, case)
    assert all(found["seconds"] > 0 and found["peak_mib"] > 1 for found in turn.values())


def test_a_side_that_fails_says_why(tmp_path: Path) -> None:
    side = Side("padded", str(tmp_path / "no model"))
    try:
        side.wait_until_up()
        with pytest.raises(RuntimeError, match="no model"):
            side.ask(case=asdict(Case(50, 1, 1)), rounds=1)
    finally:
        side.stop()
