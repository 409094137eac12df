"""Answers are checked in real processes: scores, deadlines, crashes, and an event loop that never waits."""

import asyncio
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from tests.requirements import need
from toolrl import tasks
from toolrl.config import FamilyConfig, TaskConfig
from toolrl.tasks import AnswerChecker, Task, VerifierFailed


def task(verifier, ground_truth="42", **details):
    return Task("t1", "f", [{"role": "user", "content": "?"}], ground_truth, verifier, details=details)


def own(name, **details):
    return task(f"tests.integration.own_verifiers:{name}", **details)


def checker(processes=1, deadline_s=5.0, **options):
    return AnswerChecker(TaskConfig(verifier_processes=processes, verifier_deadline_s=deadline_s), **options)


JUDGED = [
    ("42", "42", 1.0),
    ("42", " 42\n", 1.0),
    ("42", "42.0", 1.0),
    ("42", "41", 0.0),
    ("0.5", r"\frac{1}{2}", 1.0),
    (r"\frac{1}{2}", "1/2", 1.0),
    ("x^2+1", "$1 + x^2$", 1.0),
    ("1,234", "1234", 1.0),
    (7, "7", 1.0),
    (["3", "4"], "4", 1.0),
    (["3", "4"], "5", 0.0),
    ("Paris", "paris", 1.0),
    ("Paris", "pairs", 0.0),  # an anagram, which is equal as a product of letters
    ("42", "", 0.0),
    ("", "", 0.0),
    ("42", "\\" * 500 + "{{{{", 0.0),
    ("42", "\x00\ud800", 0.0),
]


async def test_math_verify_judges_equality():
    async with checker() as check:
        assert [await check.check(task("math", truth), answer) for truth, answer, _ in JUDGED] == [
            score for _, _, score in JUDGED
        ]


async def test_no_answer_scores_nothing_and_an_equal_one_needs_no_process():
    async with checker() as fast:
        assert await fast.check(task("math"), None) == 0.0
        assert await fast.check(task("math"), " 42 ") == 1.0
        assert fast._idle == []


async def test_a_family_judges_by_its_own_verifier_with_its_options():
    families = [FamilyConfig("chain_sum", 1.0, {"max_digits": 2}), FamilyConfig("rush_hour"), FamilyConfig("gcd")]
    source = tasks.build(TaskConfig(families=families), 0)
    sums = next(t for t in map(source.task, range(100)) if t.family == "chain_sum")
    async with checker() as check:
        assert await check.check(sums, f"{sums.ground_truth}.0") == 1.0
        assert await check.check(sums, "not a number") == 0.0
        puzzle = next(t for t in map(source.task, range(100)) if t.family == "rush_hour")
        assert puzzle.ground_truth is None  # many answers are right: only the verifier knows
        assert await check.check(puzzle, "nonsense") < 0.1


async def test_a_round_trip_takes_about_a_millisecond():
    async with checker() as fast:
        await fast.check(own("shout"), "A")
        laps = []
        for _ in range(200):
            started = time.perf_counter()
            assert await fast.check(own("shout", loud=True), "A") == 0.5
            laps.append(time.perf_counter() - started)
    assert sorted(laps)[100] < 0.005


async def longest_pause(until):
    """The longest time for which the event loop did not come round, while `until` runs."""
    longest, last = 0.0, time.perf_counter()
    while not until.done():
        await asyncio.sleep(0.005)
        longest, last = max(longest, time.perf_counter() - last), time.perf_counter()
    return longest


@pytest.mark.parametrize("name", ["sleeps", "backtracks"])
async def test_a_verifier_that_hangs_is_killed_while_the_loop_goes_on(name):
    async with checker(deadline_s=0.5) as check:
        await check.load(own(name).verifier)
        (process,) = check._idle
        waiting = asyncio.create_task(check.check(own(name), "60"))
        started = time.perf_counter()
        assert await longest_pause(waiting) < 0.1
        with pytest.raises(VerifierFailed, match=rf"{name}' did not answer within 0\.5 s"):
            await waiting
        assert time.perf_counter() - started < 1.5
        assert process._process.wait(5) == -signal.SIGKILL
        assert await check.check(own("shout"), "A") == 0.5


@pytest.mark.parametrize("how", ["exit", "segfault"])
async def test_a_verifier_that_crashes_costs_its_own_answer_only(how):
    async with checker(processes=2) as check:
        good = [check.check(own("shout"), "A") for _ in range(10)]
        bad = [check.check(own("dies"), how) for _ in range(3)]
        results = await asyncio.gather(*good[:5], *bad, *good[5:], return_exceptions=True)
    failures = [result for result in results if isinstance(result, VerifierFailed)]
    assert len(failures) == 3
    assert all("took its process down" in str(failure) for failure in failures)
    assert [result for result in results if not isinstance(result, VerifierFailed)] == [0.5] * 10


@pytest.mark.parametrize(
    ("name", "answer", "message"),
    [
        ("raises", "x", "raised LookupError: no such answer"),
        ("raises", "quit", "raised SystemExit"),
        ("returns", "nan", "returned nan for task t1"),
        ("returns", "inf", "returned inf"),
        ("returns", "none", "returned None"),
        ("returns", "text", "returned '1.0', which is no number"),
        ("hungry", "x", "raised MemoryError"),
        ("no_function", "x", "is no function but int"),
        ("absent", "x", "cannot be imported"),
    ],
)
async def test_what_is_no_score_is_refused_and_the_process_lives_on(name, answer, message):
    async with checker() as check:
        with pytest.raises(VerifierFailed, match=message):
            await check.check(own(name), answer)
        assert len(check._idle) == 1
        (process,) = check._idle
        assert await check.check(own("returns"), "one") == 1.0
        assert await check.check(own("returns"), "true") == 1.0
        assert check._idle == [process]


async def test_a_cancelled_check_does_not_answer_the_next_one():
    async with checker() as check:
        await check.load(own("sleeps").verifier)
        waiting = asyncio.create_task(check.check(own("sleeps"), "1"))
        await asyncio.sleep(0.1)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await check.check(own("shout"), "quiet") == 0.0


async def test_waiting_for_a_free_process_is_not_the_verifiers_time():
    async with checker(deadline_s=0.6) as check:
        assert await asyncio.gather(*(check.check(own("sleeps"), "0.3") for _ in range(4))) == [1.0] * 4


async def test_closing_leaves_no_process_behind():
    async with checker(processes=2) as check:
        await asyncio.gather(check.check(own("shout"), "A"), check.check(own("shout"), "B"))
        processes = [process._process for process in check._idle]
    assert [process.wait(5) for process in processes] == [-signal.SIGKILL] * len(processes)
    with pytest.raises(RuntimeError, match="closed"):
        await check.check(own("shout"), "A")


@pytest.mark.parametrize("name", ["shout", "backtracks"])
def test_processes_end_with_an_owner_that_is_killed_even_in_the_middle_of_a_hanging_check(name):
    owner = textwrap.dedent(f"""
        import asyncio, os, signal
        from tests.integration.test_answer_checker import checker, own
        async def main():
            async with checker(deadline_s=1.0) as check:
                await check.load(own("{name}").verifier)
                print(check._idle[0]._process.pid, flush=True)
                waiting = asyncio.create_task(check.check(own("{name}"), "A"))
                await asyncio.sleep(0.2)
                os.kill(os.getpid(), signal.SIGKILL)
        asyncio.run(main())
    """)
    done = subprocess.run([sys.executable, "-c", owner], capture_output=True, text=True, timeout=60)
    pid = int(done.stdout)
    deadline = time.monotonic() + 8
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")


def test_it_works_inside_a_ray_actor():
    need("ray")
    import ray

    @ray.remote(num_cpus=0)
    class Worker:
        async def score(self, pickled_task, answers):
            async with checker() as check:
                task = pickle.loads(pickled_task)
                return [await check.check(task, answer) for answer in answers]

    ray.init(address="local", num_cpus=1, include_dashboard=False, log_to_driver=False)
    try:
        worker = Worker.remote()
        scores = worker.score.remote(pickle.dumps(task("math", "0.5")), ["1/2", "2", None])
        assert ray.get(scores, timeout=60) == [1.0, 0.0, 0.0]
    finally:
        ray.shutdown()
