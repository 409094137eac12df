"""What is told of a child that failed: the errors that it printed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from actors.own_output import error_lines

PRINTED = """\
(Worker pid=23) WARNING 11-30 09:26:20 [cpu.py:644] Failed to import: ImportError('libnuma.so.1: cannot open shared object file')
(Worker pid=40) ERROR 11-30 09:26:21 [executor.py:953]     raise AttributeError(
(Worker pid=40) ERROR 11-30 09:26:21 [executor.py:953] AttributeError: no attribute 'init_cpu_memory_env'
Traceback (most recent call last):
  File "utils.py", line 1431, in wait
    raise RuntimeError(
RuntimeError: initialization failed
RuntimeError: initialization failed
"""


def test_the_last_errors_are_told_once_without_what_stood_in_front() -> None:
    assert error_lines("TypeError: long ago\n" + PRINTED) == [
        "ImportError('libnuma.so.1: cannot open shared object file')",
        "AttributeError: no attribute 'init_cpu_memory_env'",
        "RuntimeError: initialization failed",
    ]
    assert error_lines("all is well\nno ErrorHandler here\n") == []


def test_a_process_reads_its_childrens_errors_from_its_own_output(tmp_path: Path) -> None:
    parent = """
import subprocess, sys
subprocess.run([sys.executable, "-c", "print('x' * 10); raise ValueError('the cause')"])
from actors.own_output import last_errors
print(last_errors() == ["ValueError: the cause"])
"""
    output = tmp_path / "worker.out"
    with output.open("ab") as file:
        command = [sys.executable, "-c", parent]
        assert subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode == 0
    assert output.read_text().splitlines()[-1] == "True"
