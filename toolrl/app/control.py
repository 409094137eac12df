"""A live run takes orders: a Unix socket of the driver, found through `control.json` in the run's folder.

One order a connection, JSON a line. The client writes {"order": NAME, …arguments}; the driver answers any number of
{"say": TEXT} and at last {"done": RESULT} or {"error": TEXT, "by": "user" | "run"}. Its first answer comes at once.

The socket lies in a `private_folder`, because a socket's path may have 108 bytes at most and a run's folder may be anywhere.
Who may read the run's folder but is not its user cannot connect.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import json
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from toolrl.errors import RunError, UserError
from toolrl.private_folder import private_folder

FILE = "control.json"
FIRST_ANSWER_S = 8.0

Say = Callable[[str], None]
# Carries an order out: its arguments and where to say what is being done; returns what JSON can hold. UserError and
# RunError are told to the client; anything else too, and it is a defect.
Order = Callable[[Mapping[str, Any], Say], Awaitable[Any]]


class NotLive(UserError):
    """Nobody takes orders for this run."""


@contextlib.asynccontextmanager
async def taking_orders(folder: Path, orders: Mapping[str, Order]) -> AsyncIterator[None]:
    """Takes orders for the run in `folder` while the context lasts. An order goes on when its client has gone."""
    running: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(_carry_out(orders, reader, writer))
        running.add(task)
        task.add_done_callback(running.discard)

    with private_folder() as private:
        server = await asyncio.start_unix_server(serve, private / "socket")
        place = folder / FILE
        found = {"socket": str(private / "socket"), "host": socket.gethostname(), "pid": os.getpid()}
        partial = place.with_suffix(".partial")
        partial.write_text(json.dumps(found))
        partial.replace(place)
        try:
            yield
        finally:
            place.unlink(missing_ok=True)
            server.close()
            for task in list(running):
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)


async def _carry_out(orders: Mapping[str, Order], reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    def write(answer: dict[str, Any]) -> None:
        if not writer.is_closing():
            writer.write(json.dumps(answer).encode() + b"\n")

    try:
        asked = json.loads(await reader.readline())
        name = asked.pop("order")
        if name not in orders:
            raise UserError(f"this run takes no order {name!r}; it takes {', '.join(orders)}")
        write({"say": "taken"})
        write({"done": await orders[name](asked, lambda text: write({"say": text}))})
    except asyncio.CancelledError:
        write({"error": "the run came to its end over it", "by": "run"})
        raise
    except Exception as error:
        text = str(error) if isinstance(error, UserError | RunError) else f"{type(error).__name__}: {error}"
        write({"error": text, "by": "user" if isinstance(error, UserError) else "run"})
    finally:
        with contextlib.suppress(OSError):
            await writer.drain()
        writer.close()


def give_order(folder: Path, name: str, arguments: Mapping[str, Any], say: Say = lambda text: None) -> Any:
    """Gives an order to the run in `folder` and waits for its end; returns what came of it.

    Raises:
        NotLive: no process drives the run, or one that takes no orders; within `FIRST_ANSWER_S`.
        UserError, RunError: what the run answered.
    """
    with _connected(folder) as connection, connection.makefile("rw", encoding="utf-8") as stream:
        stream.write(json.dumps({"order": name, **arguments}) + "\n")
        stream.flush()
        try:
            for line in stream:
                connection.settimeout(None)  # it has answered; an order takes as long as it takes
                answer = json.loads(line)
                if "done" in answer:
                    return answer["done"]
                if "error" in answer:
                    raise (UserError if answer["by"] == "user" else RunError)(answer["error"])
                if answer["say"] != "taken":
                    say(answer["say"])
        except TimeoutError:
            raise NotLive(f"run {folder.name} does not answer within {FIRST_ANSWER_S:g} s: is it stopped?") from None
        except ConnectionError as error:
            raise RunError(f"run {folder.name} ended over it: {error}") from None
    raise RunError(f"run {folder.name} ended over it")


@contextlib.contextmanager
def _connected(folder: Path) -> Any:
    if not _is_held(folder):
        raise NotLive(
            f"run {folder.name} is not live: no process trains it; `toolrl train {folder.name} --resume` would"
        )
    try:
        found = json.loads((folder / FILE).read_text())
    except FileNotFoundError:
        raise NotLive(
            f"run {folder.name} is live but takes no orders now: its rollouts have not begun yet, or are over"
        ) from None
    if found["host"] != socket.gethostname():
        raise NotLive(f"run {folder.name} is driven on machine {found['host']}; give the order there")
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(FIRST_ANSWER_S)
        try:
            connection.connect(found["socket"])
        except PermissionError:
            raise NotLive(f"run {folder.name} belongs to another user (process {found['pid']})") from None
        except OSError as error:
            raise NotLive(f"run {folder.name} cannot be reached at {found['socket']}: {error}") from None
        yield connection


def _is_held(folder: Path) -> bool:
    """Whether a process trains the run now (`RunFolder.held`)."""
    try:
        with (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False
