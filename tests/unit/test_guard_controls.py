"""What guards turn: in force at once, kept while the rule holds, back in the end, the same after a stop."""

from __future__ import annotations

import itertools
import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolrl.guards.controls import Controls, Ended


def test_untouched_controls_change_nothing():
    controls = Controls.of({"outcome": 1.0, "interaction": 0.2})
    assert (controls.lr_factor, controls.kl_weight, controls.llds_weight) == (1, 0, 0)
    assert controls.reward_weights == {"outcome": 1.0, "interaction": 0.2}
    assert controls.tick(7) == [] and controls.to_dict() == {}
    assert controls.metrics() == {"controls/lr_factor": 1, "controls/kl_weight": 0, "controls/llds_weight": 0}


def test_a_control_is_in_force_for_exactly_so_many_steps():
    controls = Controls()
    controls.turn("kl_weight", 0.5, rule="r", step=10, steps=3)
    in_force = []
    for step in range(11, 16):  # the batch of each step is learnt from, then the guards are asked
        in_force.append(controls.kl_weight)
        ended = controls.tick(step)
        assert ended == ([Ended("kl_weight", ["r"])] if step == 13 else [])
    assert in_force == [0.5, 0.5, 0.5, 0, 0]


def test_it_is_kept_while_the_rule_holds_and_for_its_steps_after():
    controls = Controls()
    controls.turn("llds_weight", 0.2, rule="sinking", step=1, steps=2)
    for step in range(2, 40):
        controls.tick(step, {"sinking", "another"})
    assert controls.llds_weight == 0.2
    assert controls.tick(40) == [] and controls.tick(41) == [Ended("llds_weight", ["sinking"])]


def test_a_control_of_two_rules_is_kept_while_either_holds():
    controls = Controls()
    controls.turn("kl_weight", 0.2, rule="first", step=1, steps=5)
    controls.turn("kl_weight", 0.2, rule="second", step=2, steps=1)
    for step in range(3, 30):
        controls.tick(step, {"first"})
    assert controls.kl_weight == 0.2
    assert controls.tick(30) == [Ended("kl_weight", ["first", "second"])]


def test_it_fades_step_by_step_and_then_is_gone():
    controls = Controls()
    controls.turn("lr_factor", 0.2, rule="r", step=0, steps=1, fade=0.5)
    seen = [controls.lr_factor]
    for step in range(1, 12):
        ended = controls.tick(step)
        seen.append(controls.lr_factor)
        if ended:
            break
    assert seen[:4] == pytest.approx([0.2, 0.6, 0.8, 0.9])
    assert seen == sorted(seen) and seen[-1] == 1.0 and len(seen) == 8  # 0.5^7 of the distance is less than 1 %


def test_a_rewards_weight_comes_back_to_the_configs():
    controls = Controls.of({"interaction": 0.3})
    controls.turn("reward_weight/interaction", 0.9, rule="r", step=0, steps=1)
    assert controls.reward_weights == {"interaction": 0.9}
    assert controls.metrics()["controls/reward_weight/interaction"] == 0.9
    controls.tick(1)
    assert controls.reward_weights == {"interaction": 0.3}


@given(
    value=st.floats(0, 10),
    steps=st.integers(1, 20),
    fade=st.floats(0, 0.95),
    held=st.lists(st.booleans(), max_size=30),
    stop=st.integers(0, 60),
)
def test_every_control_ends_and_a_stop_in_between_changes_nothing(value, steps, fade, held, stop):
    """`stop`: where the state goes through JSON, as in a checkpoint."""

    def history(stopped_at: int) -> list[float]:
        controls = Controls.of({"outcome": 2.0})
        controls.turn("reward_weight/outcome", value, rule="r", step=0, steps=steps, fade=fade)
        seen = []
        for step in range(1, 400):
            if step == stopped_at:
                controls = Controls.of({"outcome": 2.0}, json.loads(json.dumps(controls.to_dict())))
            holds = step <= len(held) and held[step - 1]
            controls.tick(step, {"r"} if holds else frozenset())
            seen.append(controls.value("reward_weight/outcome"))
        return seen

    seen = history(0)
    assert seen == history(stop)
    assert seen[-1] == 2.0
    distances = [abs(each - 2.0) for each in seen]
    assert all(later <= before for before, later in itertools.pairwise(distances))


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1])
def test_a_value_that_is_none_is_refused(value):
    with pytest.raises(ValueError, match="kl_weight"):
        Controls().turn("kl_weight", value, rule="r", step=0, steps=1)


def test_an_unknown_control_and_an_ending_that_is_none_are_refused():
    with pytest.raises(ValueError, match="did you mean 'lr_factor'"):
        Controls().turn("lr_facto", 0.5, rule="r", step=0, steps=1)
    with pytest.raises(ValueError, match="reward_weight/interaction"):
        Controls.of({"outcome": 1.0}).value("reward_weight/interaction")
    for steps, fade in ((0, 0.0), (1, 1.0), (1, -0.1)):
        with pytest.raises(ValueError, match="fade"):
            Controls().turn("kl_weight", 0.5, rule="r", step=0, steps=steps, fade=fade)


def test_a_checkpoint_of_a_run_with_other_rewards_keeps_what_still_is():
    controls = Controls.of({"interaction": 0.3})
    controls.turn("reward_weight/interaction", 0.9, rule="r", step=0, steps=5)
    controls.turn("kl_weight", 0.1, rule="r", step=0, steps=5)
    later = Controls.of({"outcome": 1.0}, controls.to_dict())
    assert later.reward_weights == {"outcome": 1.0} and later.kl_weight == 0.1
