"""docs/rewards.md: it names every component and option, and its examples work as they are printed."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path

import pytest

from toolrl import registered_names
from toolrl.config import Named, RewardConfig, TaskConfig
from toolrl.rewards import GroupRewards, RewardPipeline
from toolrl.tasks import AnswerChecker, Task
from toolrl.trajectory import Outcome, Trajectory, Turn

PAGE = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> str:
    """A user's module with the code of the page."""
    module = types.ModuleType("of_the_page")
    for code in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        if re.search(r"^def ", code, re.MULTILINE):
            exec(code, module.__dict__)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def episode(length: int, outcome: float) -> Trajectory:
    turn = Turn("policy", [1] * length, [-0.1] * length, [0] * length)
    return Trajectory("t", "g", "t", 0, [1], [turn], Outcome.ANSWERED, answer="4", rewards={"outcome": outcome})


async def test_the_component_of_the_page_works(package: str) -> None:
    made = episode(5, 1.0)
    config = RewardConfig([Named(f"{package}:brevity", {"per_token": 0.01})], {"brevity": 2.0})
    async with AnswerChecker(TaskConfig()) as checker:
        await RewardPipeline(config, checker).score(made, Task("t", "f", [], "4", "math"))
    assert made.turns[0].rewards == {"brevity": pytest.approx(-0.1)}


def test_the_group_component_of_the_page_works(package: str) -> None:
    group = [episode(5, 1.0), episode(3, 1.0), episode(2, 0.0), episode(3, 1.0)]
    config = RewardConfig([Named("outcome"), Named(f"{package}:shortest_right")], {"shortest_right": 0.2})
    GroupRewards.of(config).score([group])
    assert [member.rewards["shortest_right"] for member in group] == [0.0, 0.2, 0.0, 0.2]


def test_every_row_of_the_page_is_a_component_with_its_options() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:trajectory|turn|group) \|.*\| (.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 12
    for name, told in rows:
        taken, required = registered_names.options("reward", name) or (frozenset(), frozenset())
        missing = [option for option in taken if f"`{option}`" not in told]
        assert not missing and (not required or "(needed)" in told), name
