"""What a run came to, and the errors of the pool."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

Status = Literal["ok", "error", "timeout", "oom", "output_limit", "died", "protocol_violation", "infra_error"]
STATUSES: tuple[str, ...] = get_args(Status)
STATE_LOST_NOTE = "The interpreter was restarted; variables are gone."


class SandboxError(Exception):
    """Base of the errors below."""


class SandboxUnavailable(SandboxError):
    """No box can be made; the message says why and what to do."""


class PoolExhausted(SandboxError):
    """All boxes are in use and the deadline, or the number of those who may wait, was reached."""


class FileRefused(SandboxError):
    """A name, kind or size of a file is not acceptable, or there is no such file."""


@dataclass(frozen=True, slots=True)
class SandboxFile:
    """One regular file in the work folder of an episode."""

    name: str
    size: int


@dataclass(frozen=True, slots=True)
class RunResult:
    """One cell's end.

    `stdout` and `stderr` are valid Unicode (bytes that are not UTF-8 come as backslash escapes; control characters
    are kept), with the middle left out where they were over the cap. `stderr` ends with the trimmed traceback.
    `value` is the repr of the last expression. `exit_code`: of SystemExit, or of a process that died (negative: the
    signal). `queue_s`: waited before running. `infra_error` is our fault and never the model's.
    """

    status: Status
    stdout: str = ""
    stderr: str = ""
    value: str | None = None
    truncated: bool = False
    exit_code: int | None = None
    wall_s: float = 0.0
    cpu_s: float = 0.0
    queue_s: float = 0.0
    state_lost: bool = False
    stdout_bytes: int = 0
    stderr_bytes: int = 0
    note: str = ""


def _joined(head: bytes, tail: bytes, total: int) -> tuple[str, bool]:
    left_out = total - len(head) - len(tail)
    if left_out <= 0:
        return (head + tail).decode("utf-8", "backslashreplace"), False
    note = f"\n[... {left_out} of {total} bytes omitted ...]\n"
    return head.decode("utf-8", "backslashreplace") + note + tail.decode("utf-8", "backslashreplace"), True


def _note(status: str, header: dict[str, Any], timeout_s: float) -> str:
    exit_code = header["exit_code"]
    if status == "timeout":
        told = f"The run was stopped after {timeout_s:g} s."
    elif status == "oom":
        told = "The run used more memory than it may."
    elif status == "output_limit":
        told = "The run printed more than it may."
    elif status == "died":
        told = f"The interpreter died ({exit_name(exit_code)})."
    elif status == "protocol_violation":
        told = f"The run tampered with the interpreter's own pipe ({header['note']})."
    else:
        told = ""
    return f"{told} {STATE_LOST_NOTE}".strip() if header["state_lost"] else told


def exit_name(exit_code: int | None) -> str:
    """`signal SIGSEGV` or `exit code 3`."""
    import signal

    if exit_code is None:
        return "exit code unknown"
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"signal {-exit_code}"


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("a number of bytes is none")
    return value


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < 2**31:  # false for NaN
        raise ValueError("a time is none")
    return float(value)


def from_frame(header: dict[str, Any], parts: list[bytes], timeout_s: float, queue_s: float) -> RunResult:
    """The result that a box's answer means. Raises KeyError, TypeError, ValueError where the answer is malformed."""
    status = header["status"]
    if status not in STATUSES or len(parts) != 6:
        raise ValueError(f"status {status!r} with {len(parts)} parts")
    exit_code = header["exit_code"]
    if exit_code is not None and (type(exit_code) is not int or abs(exit_code) >= 2**31):
        raise ValueError("exit_code is no exit code")
    stdout_bytes, stderr_bytes = _count(header["stdout_bytes"]), _count(header["stderr_bytes"])
    stdout, cut_out = _joined(parts[0], parts[1], stdout_bytes)
    stderr, cut_err = _joined(parts[2], parts[3], stderr_bytes)
    value = parts[4].decode("utf-8", "backslashreplace")
    error = parts[5].decode("utf-8", "backslashreplace")
    if error:
        stderr += ("" if not stderr or stderr.endswith("\n") else "\n") + error
    return RunResult(
        status=status,
        stdout=stdout,
        stderr=stderr,
        value=value or None,
        truncated=cut_out or cut_err,
        exit_code=exit_code,
        wall_s=_seconds(header["wall_s"]),
        cpu_s=_seconds(header["cpu_s"]),
        queue_s=queue_s,
        state_lost=bool(header["state_lost"]),
        stdout_bytes=stdout_bytes,
        stderr_bytes=stderr_bytes,
        note=_note(status, header, timeout_s),
    )
