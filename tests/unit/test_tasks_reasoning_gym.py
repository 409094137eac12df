"""Tasks made by reasoning_gym: deterministic, mixed as configured, disjoint from what is held out."""

import json
import subprocess
import sys
from collections import Counter

import pytest

from toolrl import tasks
from toolrl.config import FamilyConfig, TaskConfig
from toolrl.registry import UnknownName

SUMS = FamilyConfig("chain_sum", 3.0, {"min_terms": 2, "max_terms": 2, "min_digits": 2, "max_digits": 2})
MIX = [SUMS, FamilyConfig("gcd", 1.0)]
INDICES = [0, 1, 2, 77, 499, 500, 501, 123_456, 10**12]


def source(families=MIX, seed=0, **settings):
    return tasks.build(TaskConfig(families=families, **settings), seed)


def test_a_task_depends_on_seed_and_index_alone():
    one, other = source(), source()
    forwards = {index: one.task(index) for index in INDICES}
    backwards = {index: other.task(index) for index in reversed(INDICES)}
    assert forwards == backwards
    assert forwards[0].question != source(seed=1).task(0).question


def test_neighbouring_seeds_share_no_stretch_of_tasks():
    # The generators add the index to their seed: naive seeds 0 and 1 would give the same tasks shifted by one.
    questions = [{mix.task(index).question for index in range(300)} for mix in (source(seed=0), source(seed=1))]
    assert len(questions[0] & questions[1]) < 30


def test_families_are_drawn_by_weight():
    mix = source()
    drawn = Counter(mix.task(index).family for index in range(2000))
    assert 0.70 < drawn["chain_sum"] / 2000 < 0.80


def test_a_task_says_its_family_and_difficulty_in_json_values():
    metadata = source().task(0).metadata
    assert metadata["family"] in ("chain_sum", "gcd")
    assert json.loads(json.dumps(metadata)) == metadata
    assert "num_terms" in metadata["difficulty"]


def test_messages_are_system_and_question():
    assert [message["role"] for message in source().task(0).messages] == ["system", "user"]
    assert [message["role"] for message in source(system_prompt="").task(0).messages] == ["user"]


def test_held_out_tasks_are_distinct_and_the_same_for_every_seed():
    held_out = source(held_out_tasks=101).held_out()
    assert [task.family for task in held_out].count("chain_sum") == 76
    assert len({task.question for task in held_out}) == len({task.id for task in held_out}) == 101
    assert [task.question for task in source(held_out_tasks=101, seed=5).held_out()] == [t.question for t in held_out]


def test_training_never_meets_a_held_out_question_even_where_questions_are_few(caplog):
    # 10 x 10 numbers and two signs: 200 questions in all, of which 150 are asked for.
    few = FamilyConfig("chain_sum", 1.0, {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1})
    small = source([few], held_out_tasks=150)
    held_out = {task.question for task in small.held_out()}
    trained = {small.task(index).question for index in range(3000)}
    assert not held_out & trained
    assert 50 < len(held_out) < 150
    assert len(held_out | trained) == 200
    assert "few distinct questions" in caplog.text


def test_the_same_family_twice_gives_distinct_held_out_ids():
    easy_and_hard = [SUMS, FamilyConfig("chain_sum", 1.0, {"min_digits": 5, "max_digits": 6})]
    ids = [task.id for task in source(easy_and_hard, held_out_tasks=20).held_out()]
    assert len(ids) == len(set(ids)) == 20


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (FamilyConfig("chain_sun"), "did you mean 'chain_sum'"),
        (FamilyConfig("composite"), "unknown reasoning_gym family 'composite'"),
        (FamilyConfig("chain_sum", -1.0), "weight -1.0"),
        (FamilyConfig("chain_sum", float("nan")), "weight nan"),
        (FamilyConfig("chain_sum", 1.0, {"min_term": 2}), "unknown option 'min_term'; did you mean 'min_terms'"),
        (FamilyConfig("chain_sum", 1.0, {"min_terms": "two"}), "option 'min_terms' must be int, got 'two'"),
        (FamilyConfig("chain_sum", 1.0, {"min_terms": True}), "option 'min_terms' must be int, got True"),
        (FamilyConfig("chain_sum", 1.0, {"seed": 3}), "option 'seed' is set by toolrl"),
        (FamilyConfig("chain_sum", 1.0, {"min_terms": 5, "max_terms": 2}), "max_terms must be >= min_terms"),
    ],
)
def test_a_wrong_family_or_option_is_named(family, message):
    with pytest.raises(ValueError, match=message):
        source([family])


def test_a_mix_needs_a_family_with_weight():
    with pytest.raises(ValueError, match=r"tasks\.families is empty"):
        source([])
    with pytest.raises(ValueError, match="all 0"):
        source([FamilyConfig("gcd", 0.0)])


def test_an_unknown_kind_names_the_nearest():
    with pytest.raises(UnknownName, match="did you mean 'rows'"):
        tasks.build(TaskConfig(kind="row"), 0)


def test_importing_tasks_loads_nothing_heavy():
    heavy = ["reasoning_gym", "datasets", "math_verify", "torch"]
    code = f"import toolrl.tasks, sys; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
