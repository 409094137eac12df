"""Trajectories as Parquet, for notebooks and data sets: `write` and `read` are each other's inverse.

One row a trajectory; its turns are a list of structs. Numbers, names and texts have columns of their own; what is
free-form (call arguments, metadata, the rewards and timings by name) is JSON text, so that any reader can open the
file. The columns after `metadata` are derived, for filtering without unpacking, and are not read back.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from toolrl.trajectory import CallError, Outcome, ToolCall, ToolResult, Trajectory, Turn

ROWS_PER_GROUP = 256

_CALL = pa.struct([("id", pa.string()), ("name", pa.string()), ("arguments", pa.string())])
_CALL_ERROR = pa.struct([("kind", pa.string()), ("message", pa.string())])
_RESULT = pa.struct(
    [
        ("call_id", pa.string()),
        ("name", pa.string()),
        ("status", pa.string()),
        ("text", pa.string()),
        ("truncated", pa.bool_()),
        ("wall_s", pa.float64()),
        ("queue_s", pa.float64()),
        ("cpu_s", pa.float64()),
        ("output_bytes", pa.int64()),
        ("injected", pa.bool_()),
    ]
)
_TURN = pa.struct(
    [
        ("kind", pa.string()),
        ("token_ids", pa.list_(pa.int64())),
        ("logprobs", pa.list_(pa.float64())),
        ("weight_versions", pa.list_(pa.int64())),
        ("finish_reason", pa.string()),
        ("text", pa.string()),
        ("calls", pa.list_(_CALL)),
        ("call_errors", pa.list_(_CALL_ERROR)),
        ("rewards", pa.string()),
        ("results", pa.list_(_RESULT)),
        ("fresh_context", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("group_id", pa.string()),
        ("task_id", pa.string()),
        ("sample_index", pa.int64()),
        ("prompt_ids", pa.list_(pa.int64())),
        ("turns", pa.list_(_TURN)),
        ("outcome", pa.string()),
        ("limit", pa.string()),
        ("answer", pa.string()),
        ("rewards", pa.string()),
        ("temperature", pa.float64()),
        ("timings", pa.string()),
        ("metadata", pa.string()),
        ("reward", pa.float64()),
        ("n_calls", pa.int64()),
        ("n_policy_turns", pa.int64()),
        ("policy_tokens", pa.int64()),
        ("oldest_version", pa.int64()),
    ],
    metadata={"toolrl": "trajectories, format 1"},
)


def write(path: str | Path, trajectories: Iterable[Trajectory]) -> int:
    """Writes them in row groups, so that any number fits into memory. Returns how many.

    Raises:
        ValueError: a text that is not valid Unicode (a lone surrogate), with the trajectory's id.
    """
    rows = iter(trajectories)
    count = 0
    with pq.ParquetWriter(path, SCHEMA, compression="zstd") as writer:
        while chunk := list(itertools.islice(rows, ROWS_PER_GROUP)):
            try:
                table = pa.Table.from_pylist([_row(trajectory) for trajectory in chunk], schema=SCHEMA)
            except UnicodeEncodeError as error:
                raise ValueError(
                    f"one of the trajectories {chunk[0].id} to {chunk[-1].id} holds text that is not Unicode: {error}; "
                    "clean it with toolrl.conversation.clean_text before it is recorded"
                ) from error
            writer.write_table(table)
            count += len(chunk)
    return count


def read(path: str | Path) -> Iterator[Trajectory]:
    """The trajectories of a file that `write` made, a row group at a time.

    Raises:
        ValueError: a Parquet file with other columns.
    """
    with pq.ParquetFile(path) as file:
        wanted = [name for name in SCHEMA.names if name in _FIELDS]
        missing = sorted(set(wanted) - set(file.schema_arrow.names))
        if missing:
            raise ValueError(f"{path} holds no trajectories: the columns {', '.join(missing)} are missing")
        for batch in file.iter_batches(batch_size=ROWS_PER_GROUP, columns=wanted):
            yield from (_trajectory(row) for row in batch.to_pylist())


_FIELDS = frozenset(Trajectory.__slots__)


def _row(t: Trajectory) -> dict[str, Any]:
    turns = t.policy_turns
    return {
        "id": t.id,
        "group_id": t.group_id,
        "task_id": t.task_id,
        "sample_index": t.sample_index,
        "prompt_ids": t.prompt_ids,
        "turns": [_turn_row(turn) for turn in t.turns],
        "outcome": None if t.outcome is None else t.outcome.value,
        "limit": t.limit,
        "answer": t.answer,
        "rewards": json.dumps(t.rewards),
        "temperature": t.temperature,
        "timings": json.dumps(t.timings),
        "metadata": json.dumps(t.metadata),
        "reward": t.reward,
        "n_calls": sum(len(turn.calls) for turn in turns),
        "n_policy_turns": len(turns),
        "policy_tokens": sum(len(turn.token_ids) for turn in turns),
        "oldest_version": t.oldest_version,
    }


def _turn_row(turn: Turn) -> dict[str, Any]:
    return {
        "kind": turn.kind,
        "token_ids": turn.token_ids,
        "logprobs": turn.logprobs,
        "weight_versions": turn.weight_versions,
        "finish_reason": turn.finish_reason,
        "text": turn.text,
        "calls": [{"id": c.id, "name": c.name, "arguments": json.dumps(c.arguments)} for c in turn.calls],
        "call_errors": [{"kind": e.kind, "message": e.message} for e in turn.call_errors],
        "rewards": json.dumps(turn.rewards),
        "results": [{name: getattr(r, name) for name in _RESULT.names} for r in turn.results],
        "fresh_context": turn.fresh_context,
    }


def _trajectory(row: dict[str, Any]) -> Trajectory:
    outcome = row.pop("outcome")
    return Trajectory(
        **{name: json.loads(row.pop(name)) for name in ("rewards", "timings", "metadata")},
        turns=[_turn(turn) for turn in row.pop("turns")],
        outcome=None if outcome is None else Outcome(outcome),
        **row,
    )


def _turn(row: dict[str, Any]) -> Turn:
    return Turn(
        rewards=json.loads(row.pop("rewards")),
        calls=[ToolCall(c["id"], c["name"], json.loads(c["arguments"])) for c in row.pop("calls")],
        call_errors=[CallError(**error) for error in row.pop("call_errors")],
        results=[ToolResult(**result) for result in row.pop("results")],
        **row,
    )
