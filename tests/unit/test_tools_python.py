"""What the model sees of a run of code."""

from dataclasses import dataclass

import pytest

from toolrl.config import ToolConfig
from toolrl.errors import UserError
from toolrl.tools.python import STATE_LOST, python, text_of

TRACEBACK = "Traceback (most recent call last):\n  File \"<cell>\", line 1\n    x\nNameError: name 'x' is not defined\n"


@dataclass
class Run:
    status: str = "ok"
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    truncated: bool = False
    exit_code: int | None = None
    wall_s: float = 0.0
    queue_s: float = 0.0
    cpu_s: float = 0.0
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    state_lost: bool = False
    note: str = ""


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (Run(stdout="42\n"), "42"),
        (Run(value="42"), "42"),
        (Run(stdout="a\nb\n", value="42"), "a\nb\n42"),
        (Run(), "(no output)"),
        (Run(stdout="  indented\n\n"), "  indented"),
        (Run(stdout="1\n", stderr="warning: old\n"), "1\nwarning: old"),
        (Run("error", stdout="1\n", stderr=TRACEBACK), f"1\n{TRACEBACK.rstrip()}"),
        (Run("error"), "Error: the code failed"),
        (Run("timeout", stdout="1\n"), "1\nError: the code did not finish within 5 s"),
        (
            Run("timeout", state_lost=True),
            f"Error: the code did not finish within 5 s\n{STATE_LOST}",
        ),
        (Run("oom", state_lost=True), f"Error: the code used up its memory\n{STATE_LOST}"),
        (Run("died", exit_code=3, state_lost=True), f"Error: the interpreter ended with exit code 3\n{STATE_LOST}"),
        (Run("output_limit", stdout="aaa"), "aaa\nError: the code printed too much and was stopped"),
        (Run("protocol_violation"), "Error: the code disturbed the interpreter and was stopped"),
    ],
)
def test_a_run_is_told_as_output_value_error_and_lost_state(run, text):
    assert text_of(run, timeout_s=5.0, error_lines=12) == text


def test_an_error_is_cut_from_its_beginning():
    run = Run("error", stderr=TRACEBACK)
    assert text_of(run, timeout_s=5.0, error_lines=1) == "NameError: name 'x' is not defined"
    deep = Run("error", stderr="\n".join(f"frame {i}" for i in range(1000)) + "\nRecursionError: too deep\n")
    told = text_of(deep, timeout_s=5.0, error_lines=12).splitlines()
    assert len(told) == 12
    assert told[-1] == "RecursionError: too deep"


def test_a_folder_of_files_that_is_not_there_is_told_at_once(tmp_path):
    with pytest.raises(UserError, match="is no folder"):
        python(ToolConfig("python", options={"files": str(tmp_path / "missing")}), interpreter=object())
