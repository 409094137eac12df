"""Tasks from JSONL and Parquet files in verl's columns."""

import json
from collections import Counter

import pyarrow
import pyarrow.parquet
import pytest

from toolrl import tasks
from toolrl.config import TaskConfig
from toolrl.tasks import verifiers


def verl_row(number, prompt=None):
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": prompt or f"What is {number} + {number}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(2 * number)},
        "extra_info": {"index": number, "difficulty": 2},
    }


def write(path, rows):
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def source(path, seed=0, held_out=4, **settings):
    return tasks.build(TaskConfig(kind="rows", path=path, held_out_tasks=held_out, **settings), seed)


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.parquet"])
def test_verls_columns_are_read_from_either_format(tmp_path, name):
    task = source(write(tmp_path / name, [verl_row(number) for number in range(20)]), shuffle=False).task(0)
    number = task.details["extra_info"]["index"]
    assert task.messages[0]["role"] == "system"
    assert task.messages[1] == {"role": "user", "content": f"What is {number} + {number}?"}
    assert task.ground_truth == str(2 * number)
    assert task.verifier == "math"
    assert task.metadata == {"family": "sums", "difficulty": 2}


def test_columns_can_be_mapped_and_a_prompt_can_be_text(tmp_path):
    rows = [{"question": f"q{i}", "solution": f"Work.\n#### {i}"} for i in range(9)]
    mapped = source(
        write(tmp_path / "gsm.jsonl", rows),
        columns={"prompt": "question", "ground_truth": "solution"},
        options={"ground_truth_after": "####"},
        system_prompt="",
    )
    task = mapped.task(0)
    assert task.messages == [{"role": "user", "content": f"q{task.ground_truth}"}]
    assert task.family == "rows"


def test_a_rows_own_system_message_is_kept(tmp_path):
    row = verl_row(1)
    row["prompt"].insert(0, {"role": "system", "content": "Be brief."})
    assert source(write(tmp_path / "t.jsonl", [row]), held_out=0).task(0).messages[0]["content"] == "Be brief."


def test_every_epoch_is_another_permutation_that_the_seed_decides(tmp_path):
    path = write(tmp_path / "t.jsonl", [verl_row(number) for number in range(24)])
    one, again, other = source(path), source(path), source(path, seed=1)
    assert one.size == 20
    epochs = [[one.task(index).id for index in range(20 * e, 20 * (e + 1))] for e in range(3)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(sorted(epochs[0]))}
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert [again.task(index).id for index in reversed(range(60))][::-1] == [*epochs[0], *epochs[1], *epochs[2]]
    assert [other.task(index).id for index in range(20)] != epochs[0]
    assert [source(path, shuffle=False).task(index).id for index in (0, 20)] == [one._training[0].id] * 2


def test_held_out_rows_are_never_trained_on_nor_are_their_copies(tmp_path):
    rows = [verl_row(number % 10, prompt=f"copy of {number % 10}") for number in range(30)]
    two = source(write(tmp_path / "t.jsonl", rows))
    held_out = {task.question for task in two.held_out()}
    assert len(two.held_out()) == len(held_out) == 4
    assert two.size == 18
    trained = Counter(two.task(index).question for index in range(18))
    assert not held_out & set(trained)
    assert set(trained.values()) == {3}
    assert {t.question for t in source(write(tmp_path / "t2.jsonl", rows[::-1]), seed=9).held_out()} == held_out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": None}, r"row 2, column 'prompt': must be a string or a list of messages, got None"),
        ({"prompt": []}, r"row 2, column 'prompt'"),
        ({"prompt": [{"role": "user"}]}, r"row 2, column 'prompt': a message must hold role and content"),
        ({"prompt": [{"role": "tool", "content": "x"}]}, r"row 2.*role must be"),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, r"row 2.*last message must be the user's"),
        ({"reward_model": {"style": "rule"}}, r"row 2: no column 'reward_model.ground_truth' \(it has data_source"),
        ({"reward_model": {"ground_truth": float("nan")}}, r"row 2.*no answer can equal nan"),
        ({"reward_model": {"ground_truth": None}}, r"row 2.*no answer can equal None"),
        ({"reward_model": {"ground_truth": {"a": 1}}}, r"row 2.*math-verify takes text or numbers, got \{'a': 1\}"),
    ],
)
def test_a_wrong_row_is_named_with_its_column_and_value(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        source(write(tmp_path / "t.jsonl", [verl_row(0), {**verl_row(1), **change}]), held_out=0)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": {"promt": "q"}}, "did you mean 'prompt'"),
        ({"columns": {"prompt": "q"}}, r"no column 'q'.*tasks\.columns\.prompt=COLUMN"),
        ({"options": {"ground_truth_after": "####"}}, "'####' is not in '0'"),
        ({"options": {"sep": ","}}, "no key 'sep'"),
        ({"held_out": 2}, "has 2 distinct prompts and tasks.held_out_tasks=2"),
    ],
)
def test_a_wrong_setting_is_named(tmp_path, settings, message):
    with pytest.raises(ValueError, match=message):
        source(write(tmp_path / "t.jsonl", [verl_row(0), verl_row(1)]), **{"held_out": 0, **settings})


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt"\n')
    (tmp_path / "list.jsonl").write_text("[1]\n")
    (tmp_path / "t.csv").write_text("a,b\n")
    for path, message in [
        (str(tmp_path / "absent.jsonl"), "is no file"),
        (str(tmp_path / "broken.jsonl"), "line 2 is not JSON"),
        (str(tmp_path / "list.jsonl"), "line 1 must be an object"),
        (str(tmp_path / "t.csv"), r"must end in \.jsonl or \.parquet"),
        (None, "tasks.path is empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            source(path)


@pytest.mark.parametrize(
    ("answer", "truth", "score"),
    [
        ("The Beatles", "beatles", 1.0),
        ("St. John's, N.L.", "st johns  NL", 1.0),
        ("apolo 11", ["Apollo 11", "Apollo XI"], 0.0),
        ("Apollo XI!", ["Apollo 11", "Apollo XI"], 1.0),
        ("1969", 1969, 1.0),
        ("the", "a", 0.0),  # nothing is left to compare
    ],
)
def test_exact_match_ignores_case_punctuation_and_articles(answer: str, truth: object, score: float) -> None:
    assert verifiers.load("exact_match")(answer, truth, {}) == score
