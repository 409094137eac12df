"""The guards' actions: what each turns, how far it goes, and which leave it to the loop."""

from __future__ import annotations

import pytest

from toolrl.guards.actions import CORRECTIONS, Order, guard_actions, needs_reference
from toolrl.guards.controls import Controls
from toolrl.guards.rule import Decision


def act(name: str, controls: Controls, step: int = 10, **options: object) -> Order | None:
    return guard_actions.get(name)(controls, Decision(step, "watched", name), **options)


def until_over(controls: Controls, step: int) -> int:
    """The step at which the last control came back; nothing holds any more."""
    while controls.turned:
        step += 1
        controls.tick(step)
    return step


def test_lower_lr_halves_again_and_again_but_never_below_the_floor():
    controls = Controls()
    factors = []
    for step in range(5):
        assert act("lower_lr", controls, step, floor=0.2) is None
        factors.append(controls.lr_factor)
    assert factors == pytest.approx([0.5, 0.25, 0.2, 0.2, 0.2])
    assert until_over(controls, 5) > 50 and controls.lr_factor == 1.0


def test_a_second_rule_with_a_higher_floor_does_not_raise_the_rate():
    controls = Controls()
    act("lower_lr", controls, factor=0.1, floor=0.05)
    act("lower_lr", controls, factor=0.5, floor=0.5)
    assert controls.lr_factor == pytest.approx(0.1)


@pytest.mark.parametrize("name", ["kl", "llds"])
def test_the_stronger_of_two_rules_weighs(name):
    controls = Controls()
    act(name, controls, weight=0.3)
    act(name, controls, weight=0.1)
    assert controls.value(f"{name}_weight") == 0.3
    until_over(controls, 10)
    assert controls.value(f"{name}_weight") == 0.0


def test_the_interaction_weight_rises_while_it_is_called_and_decays_after():
    controls = Controls.of({"interaction": 0.0})
    seen = []
    for step in range(1, 11):
        controls.tick(step, {"watched"})
        act("interaction_weight", controls, step, growth=2.0, least=0.1, most=1.5)
        seen.append(controls.reward_weights["interaction"])
    assert seen[:5] == pytest.approx([0.1, 0.2, 0.4, 0.8, 1.5]) and seen[-1] == 1.5
    for step in range(11, 20):
        controls.tick(step)
    assert 0 < controls.reward_weights["interaction"] < 1.5
    until_over(controls, 19)
    assert controls.reward_weights == {"interaction": 0.0}


def test_a_weight_above_the_controllers_range_is_left_alone():
    controls = Controls.of({"interaction": 3.0})
    act("interaction_weight", controls, most=2.0)
    assert controls.reward_weights["interaction"] == 3.0


def test_orders_carry_their_options_and_turn_nothing():
    controls = Controls()
    assert act("reject_batch", controls, most_in_a_row=2) == Order("reject_batch", {"most_in_a_row": 2})
    assert act("roll_back", controls) == Order("roll_back", {"margin_steps": 5, "most_in_a_row": 3})
    assert act("sft_burst", controls, steps=3) == Order(
        "sft_burst", {"steps": 3, "batch_size": 16, "learning_rate": None}
    )
    assert act("pause", controls, deadline_s=5.0) == Order("pause", {"deadline_s": 5.0})
    assert controls.turned == {}


def test_corrections_are_the_actions_that_give_no_order():
    for name in guard_actions:
        order = act(name, Controls.of({"interaction": 0.1}))
        assert (order is None) == (name in CORRECTIONS), name
    assert act("tell", Controls()) is None


def test_only_kl_makes_the_learner_keep_a_reference():
    assert [name for name in guard_actions if needs_reference([name])] == ["kl"]
    assert needs_reference(["tell", "kl"]) and not needs_reference([])
