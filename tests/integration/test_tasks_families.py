"""Every family of reasoning_gym as a source of tasks."""

import os
import subprocess
import sys
import textwrap


def test_every_family_gives_tasks_that_travel_and_are_the_same_in_every_process():
    code = textwrap.dedent("""
        import hashlib, pickle
        from toolrl import tasks
        from toolrl.config import FamilyConfig, TaskConfig
        from toolrl.tasks.reasoning_gym import known_families
        for name in sorted(known_families()):
            source = tasks.build(TaskConfig(families=[FamilyConfig(name)], held_out_tasks=0), 0)
            made = [source.task(index) for index in (0, 12345)]
            assert pickle.loads(pickle.dumps(made)) == made, name
            print(name, [hashlib.sha1(t.question.encode()).hexdigest()[:8] for t in made])
    """)
    # PYTHONHASHSEED=0 admits the few families that depend on it; two processes must agree.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    runs = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    told = [run.communicate(timeout=120)[0] for run in runs]
    assert [run.returncode for run in runs] == [0, 0]
    assert len(told[0].splitlines()) > 90
    assert told[0] == told[1]


def test_a_family_that_follows_the_hash_seed_is_refused_unless_that_is_fixed():
    code = (
        "from toolrl import tasks; from toolrl.config import *;"
        "print(tasks.build(TaskConfig(families=[FamilyConfig('ransom_note')]), 0).task(0).question)"
    )

    def run(hash_seed):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)

    assert "PYTHONHASHSEED=0" in run("random").stderr
    assert run("0").stdout == run("0").stdout != ""


def test_no_odd_answer_escapes_its_score_in_any_family():
    code = textwrap.dedent("""
        from toolrl import tasks
        from toolrl.config import FamilyConfig, TaskConfig
        from toolrl.tasks import verifiers
        from toolrl.tasks.reasoning_gym import known_families
        odd = ("-17.5", "x", "[]", "1e999", "a b c", "\\\\n", "{}", "1/0", "½", "(" * 200, "9" * 400)
        for name in sorted(known_families()):
            task = tasks.build(TaskConfig(families=[FamilyConfig(name)], held_out_tasks=0), 0).task(7)
            for answer in odd:
                score = verifiers.reasoning_gym(answer, task.ground_truth, task.details)
                assert 0 <= score <= 1, (name, answer, score)
        print("all scored")
    """)
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.endswith("all scored\n"), done.stderr[-2000:]
