"""Saved at an epoch boundary: the epochs that remain are trained, none twice, none skipped."""

from __future__ import annotations

from tests.replay_samples import MakeStore, all_tickets, finish, train
from toolrl.config import TaskConfig
from toolrl.tasks.rows import Rows


def source() -> Rows:
    rows = [{"prompt": f"question {n}", "reward_model": {"ground_truth": str(n)}} for n in range(4)]
    return Rows(rows, TaskConfig(kind="rows", held_out_tasks=0), seed=0, where="here")


def step(store, number: int) -> list[int]:
    for ticket in all_tickets(store, engine_version=number - 1):
        finish(store, "w0", ticket, version=number - 1)
    return train(store, 2, number, number - 1)


def test_a_run_saved_where_an_epoch_ends_goes_on_with_the_next(make: MakeStore) -> None:
    whole = make(total_groups=12)
    trained = [step(whole, 1), step(whole, 2)]  # the four rows of the first epoch
    reopened = make(total_groups=12)
    reopened.rollback_to(2, 2)
    trained += [step(reopened, number) for number in (3, 4)]
    again = make(total_groups=12)
    again.rollback_to(4, 4)
    trained += [step(again, number) for number in (5, 6)]
    indices = [index for each in trained for index in each]
    assert indices == list(range(12))
    tasks = source()
    for epoch in range(3):
        questions = sorted(tasks.task(index).question for index in indices[4 * epoch : 4 * epoch + 4])
        assert questions == [f"question {n}" for n in range(4)]
    assert all_tickets(again, engine_version=6) == []
