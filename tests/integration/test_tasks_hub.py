"""Tasks from a dataset by name, read by the real library from a local folder."""

import json

import pytest

from toolrl import tasks
from toolrl.config import TaskConfig


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "sums"
    data.mkdir()
    for split, first in (("train", 0), ("test", 100)):
        rows = [{"question": f"What is {i} + 1?", "answer": f"Add.\n#### {i + 1}"} for i in range(first, first + 12)]
        (data / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(data)


def source(path, **settings):
    columns = {"prompt": "question", "ground_truth": "answer"}
    options = {"ground_truth_after": "####", **settings.pop("options", {})}
    config = TaskConfig(kind="hub", path=path, columns=columns, options=options, held_out_tasks=2, **settings)
    return tasks.build(config, 0)


def test_a_dataset_folder_becomes_tasks(folder):
    train, test = source(folder), source(folder, split="test")
    assert train.size == test.size == 10
    task = train.task(3)
    assert task.question == f"What is {int(task.ground_truth) - 1} + 1?"
    assert all(int(task.ground_truth) > 100 for task in test.held_out())


def test_a_dataset_that_cannot_be_loaded_says_what_to_do(folder):
    with pytest.raises(ValueError, match=r"'valid' cannot be loaded.*Check the name and the split"):
        source(folder, split="valid")
    with pytest.raises(ValueError, match=r"cannot be loaded.*tasks\.kind=rows"):
        source("nobody/no-such-dataset")
    with pytest.raises(ValueError, match="no key 'revison' for a dataset; did you mean 'revision'"):
        source(folder, options={"revison": "main"})
    with pytest.raises(ValueError, match=r"tasks\.path is empty"):
        source(None)
