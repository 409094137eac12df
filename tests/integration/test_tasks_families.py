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
            source = tasks.build(TaskConfig(families=[FamilyConfig(name)], held_out_tasks=1), 0)
            made = [source.task(index) for index in (0, 12345)]
            assert pickle.loads(pickle.dumps(made)) == made, name
            print(name, [hashlib.sha1(t.question.encode()).hexdigest()[:8] for t in made])
    """)
    # PYTHONHASHSEED=0 admits the few families that depend on it; two processes must agree.
    environment = {**os.environ, "PYTHONHASHSEED": "0"}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
        for _ in range(2)
    ]
    assert runs[0].returncode == 0, runs[0].stderr[-2000:]
    assert len(runs[0].stdout.splitlines()) > 90
    assert runs[0].stdout == runs[1].stdout
