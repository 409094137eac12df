"""A group of processes that lasts for some updates: the learner's rank 0 sends, the engines' processes receive. Over TCP, from
host memory. Imports no vLLM.

Invariants:
- Every wait ends at a deadline that its caller gives.
- Whoever drops its end closes its connections: the others' waits then fail at once. There is no other way to stop them.
- It listens at the given address alone.
"""

from __future__ import annotations

import itertools
import socket
import time
import weakref
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import ProcessGroupGloo

SHORTEST_WAIT_S = 0.05


class GroupBroken(RuntimeError):
    """A member is gone, late, or never came. `ranks` are those known to be at fault."""

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


def open_meeting(address: str, deadline_s: float) -> tuple[TCPStore, int]:
    """Where members find each other, and its port; it lasts as long as the store that is returned."""
    listening = socket.socket(_family(address))
    listening.bind((address, 0))
    listening.listen(1024)
    port = int(listening.getsockname()[1])
    store = TCPStore(
        address,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=deadline_s),
        master_listen_fd=listening.detach(),
    )
    return store, port


class GlooGroup:
    """One member's end. Rank 0 is the sender."""

    def __init__(self, store: TCPStore, *, rank: int, size: int, here: str, deadline_s: float) -> None:
        """Returns when all members are connected.

        Args:
            here: the address of this host at which the others reach it.

        Raises:
            GroupBroken: some did not come; rank 0's says which.
        """
        self.rank, self.size = rank, size
        self._store = store
        # Connections last as long as the works that use them, wherever those are held: in the frames of an exception, too.
        self._works: dict[int, list[tuple[int, Any]]] = {}
        self._numbers = itertools.count()
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=here)]
        options._timeout = timedelta(seconds=max(deadline_s, 1.0))
        options._threads = 1
        try:
            store.set(f"here/{rank}", b"1")
            self._group: ProcessGroupGloo | None = ProcessGroupGloo(PrefixStore("group", store), rank, size, options)
        except RuntimeError as error:
            missing = () if rank else tuple(other for other in range(1, size) if not store.check([f"here/{other}"]))
            raise GroupBroken(f"the group did not form in {deadline_s:.3g} s: {_first_line(error)}", missing) from error

    @classmethod
    def join(cls, address: str, port: int, *, rank: int, size: int, deadline_s: float) -> GlooGroup:
        """A receiver's end. The others reach it at the address at which this host reaches the sender's.

        Raises:
            GroupBroken: nobody at the address, or see above.
        """
        try:
            store = TCPStore(
                address, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=max(deadline_s, 1.0))
            )
        except RuntimeError as error:
            raise GroupBroken(f"no learner at {address}:{port}: {_first_line(error)}") from error
        return cls(store, rank=rank, size=size, here=own_address(address), deadline_s=deadline_s)

    def send(self, content: torch.Tensor, until: float) -> Callable[[], None]:
        """Begins to send [n] uint8 to all; what it returns waits until all have it, at most until then (`time.monotonic`).

        Raises:
            GroupBroken: names the rank.
        """
        group = self._alive()
        return self._begin(range(1, self.size), lambda rank: group().send([content], rank, 0), until)

    def receive(self, content: torch.Tensor, until: float) -> Callable[[], None]:
        """As `send`, from rank 0 into `content`."""
        group = self._alive()
        return self._begin(range(1), lambda rank: group().recv([content], rank, 0), until)

    def _begin(self, ranks: Iterable[int], begin: Callable[[int], Any], until: float) -> Callable[[], None]:
        number = next(self._numbers)
        works = self._works[number] = []
        for rank in ranks:
            if (why := _failure(lambda rank=rank: works.append((rank, begin(rank))))) is not None:  # type: ignore[misc]
                raise GroupBroken(why, (rank,))

        def wait() -> None:
            while under_way := self._works.get(number):
                if (why := _failure(lambda: _wait(under_way[0][1], until))) is not None:
                    raise GroupBroken(why, (under_way[0][0],))
                under_way.pop(0)
            self._works.pop(number, None)

        return wait

    def _alive(self) -> Callable[[], ProcessGroupGloo]:
        if self._group is None:
            raise GroupBroken("the group was left")
        return weakref.ref(self._group)

    def leave(self) -> None:
        """Closes the connections; whoever waits for this member fails now."""
        self._group = None
        for works in self._works.values():
            works.clear()  # a list each, which whoever waits for them has no other hold of them than
        self._works.clear()


def own_address(other: str) -> str:
    """This host's, on the way to another."""
    with socket.socket(_family(other), socket.SOCK_DGRAM) as way:  # nothing is sent
        way.connect((other, 9))
        return str(way.getsockname()[0])


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _wait(work: Any, until: float) -> None:
    work.wait(timedelta(seconds=max(SHORTEST_WAIT_S, until - time.monotonic())))


def _failure(act: Callable[[], object]) -> str | None:
    """Why it failed, in words: the error itself would hold on to what its frames hold."""
    try:
        act()
    except RuntimeError as error:
        return _first_line(error)
    return None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
