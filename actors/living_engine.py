"""The part of an engine that is not generation: its process, its sleep, its errors, and how its weights change.

Invariants:
- An update either is whole, or the engine goes on with the weights it had, or it says that it has none.
- Weights change only in a pause, in which no token is made.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from actors.engine_answers import Answers
from actors.engine_errors import (
    REFUSED,
    EngineDied,
    EngineError,
    UpdateFailed,
    WeightsRefused,
    WeightsUnavailable,
)
from actors.engine_nodes import EngineNodes
from actors.weights.served_adapter import ServedAdapter

CHECK_EVERY_S = 1.0  # whether the engine lives, while it is waited for


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Seconds of one weight update, by part."""

    prepare_s: float  # while tokens are made
    pause_s: float
    load_s: float
    resume_s: float

    @property
    def paused_s(self) -> float:
        """How long no token was made."""
        return self.pause_s + self.load_s + self.resume_s


class LivingEngine:
    """What `actors.engine.Engine` is built on."""

    def __init__(self, llm: Any, name: str, version: int, *, max_context_tokens: int, keep_kv: bool) -> None:
        self.name = name
        self.version = version
        self.max_context_tokens = max_context_tokens
        self._llm: Any = llm
        self._keep_kv = keep_kv
        # Cleared while weights are swapped: requests then wait, to begin under the new ones.
        self._open = asyncio.Event()
        self._open.set()
        self._unavailable: str | None = None  # why no text may be made now
        # The last: the memory of the weights is back, that of the cache is not.
        self._asleep: Literal["no", "wholly", "but_for_weights"] = "no"
        self._pausing = asyncio.Lock()
        self.updating = asyncio.Lock()  # an update that has begun ends before the engine sleeps
        self.adapter: ServedAdapter | None = None  # that every request is served with; None: there are only weights
        self.nodes: EngineNodes | None = None  # the further ones that hold a share of the model

    # Weights -------------------------------------------------------------------------------------------------------

    async def update_weights(self, version: int, publication: Mapping[str, Any]) -> UpdateTimes:
        """Has vLLM's processes make ready what shared memory holds, pauses generation, swaps, labels the weights, resumes.

        Running requests stay where they are and go on with the new weights.

        Raises:
            WeightsRefused: nothing was changed. UpdateFailed: the engine has no valid weights now. EngineDied.
        """
        started = time.monotonic()
        async with self.updating:
            await self.prepare({"step": "prepare", "version": version, **publication})
            ready = time.monotonic()
            return replace(await self.swap(version), prepare_s=ready - started)

    async def swap(self, version: int) -> UpdateTimes:
        """Pauses generation, exchanges the weights for those that were prepared, labels them, resumes. Within `updating`."""
        started = time.monotonic()
        async with self.paused():
            paused = time.monotonic()
            try:
                await self.finish_update(version, {"step": "apply", "version": version})
            except UpdateFailed as error:
                await self.abandon_update(str(error))
                raise
            loaded = time.monotonic()
        return UpdateTimes(0.0, paused - started, loaded - paused, time.monotonic() - loaded)

    async def load_adapter(self, version: int, request: Any) -> UpdateTimes:
        """Has vLLM load the adapter of a `LoRARequest` in a pause and labels it; see `ServedAdapter`.

        Raises:
            UpdateFailed: the engine has no valid weights now. EngineDied.
        """
        started = time.monotonic()
        async with self.paused():
            paused = time.monotonic()
            await self._finish(version, self._alive().add_lora(request))
            loaded = time.monotonic()
        return UpdateTimes(0.0, paused - started, loaded - paused, time.monotonic() - loaded)

    async def prepare(self, payload: Mapping[str, Any]) -> None:
        """Returns when every process of the engine has written to a pipe that it is ready: asking them would disturb them.
        Within `updating`; the next is `swap` or `refuse`."""
        self._check_has_room()
        with self._failing_update(touched=False):
            answers = Answers(self._alive().vllm_config.parallel_config.local_world_size)
            told = {**payload, "answer": answers.address}
            if self.nodes is not None:
                told["elsewhere_answers"] = await self.nodes.expect_answers()
            try:
                await _in_order(self._alive().start_weight_update(), self._send(told))
                while not await answers.all_in(CHECK_EVERY_S):
                    await self.check()
                good = answers.good and (self.nodes is None or await self.nodes.all_good())
                if not good:
                    await self._send({"step": "refuse", "version": payload["version"]})  # raises and says why
            finally:
                answers.close()

    async def refuse(self, why: str) -> None:
        """Instead of `swap`: the engine goes on with the weights it has."""
        with contextlib.suppress(UpdateFailed, WeightsRefused), self._failing_update(touched=False):
            await self._send({"step": "refuse", "version": self.version, "why": why})

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No token is made inside. Requests keep their places; if the weights end up invalid, they are aborted.

        An engine that sleeps makes none anyway, and goes on with none before its cache is back.

        Raises:
            WeightsRefused: it sleeps, and there is no memory to put weights into.
        """
        async with self._pausing:
            self._check_has_room()
            if self._asleep == "but_for_weights":
                yield
                return
            self._open.clear()
            try:
                with self._naming_death():
                    # Not through `pause_generation`, which waits another 20 ms, for the order of outputs that we do not need.
                    await self._alive().engine_core.pause_scheduler_async("keep", not self._keep_kv)
                try:
                    yield
                finally:
                    with self._naming_death():
                        if not self.has_weights:
                            await self._alive().pause_generation(mode="abort", clear_cache=True)
                        await self._alive().resume_generation()
            finally:
                self._open.set()

    async def begin_update(self) -> None:
        """First of the three steps of an update, inside `paused()`."""
        with self._failing_update():
            await self._alive().start_weight_update()

    async def transfer(self, payload: Mapping[str, Any]) -> None:
        """Second step, as often as the transport has payloads."""
        with self._failing_update():
            await self._send(payload)

    async def finish_update(self, version: int, payload: Mapping[str, Any] | None = None) -> None:
        """Last step, with the last payload if there is one: the weights are complete and are `version` from here on."""
        messages = [self._alive().finish_weight_update()]
        if payload is not None:
            messages.insert(0, self._send(payload))
        await self._finish(version, *messages)

    async def _finish(self, version: int, *messages: Awaitable[None]) -> None:
        llm = self._alive()
        with self._failing_update():
            try:
                await _in_order(*messages, llm.update_weight_version(str(version)))
            except Exception:
                with contextlib.suppress(Exception):
                    await llm.update_weight_version(str(self.version))
                raise
        self.version, self._unavailable = version, None

    async def _send(self, payload: Mapping[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._alive().update_weights(WeightTransferUpdateRequest(update_info=dict(payload)))

    async def abandon_update(self, why: str) -> None:
        """Instead of the last step: the weights are invalid, and the next update may begin."""
        self.invalidate(why)
        # vLLM ends an update before its last step only when a payload is wrong, so it gets one that is.
        with contextlib.suppress(UpdateFailed):
            await self.transfer({"abandoned": why})

    async def connect_trainer(self, init_info: Mapping[str, Any]) -> None:
        """For transports that have a connection: joins the trainer's."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with self._naming_death():
            await self._alive().init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(init_info)))

    async def checksums(self) -> list[dict[str, str]]:
        """vLLM's SHA-256 of every parameter as the engine holds it, packed; one mapping a tensor-parallel rank."""
        with self._naming_death():
            return list(await self._alive().compute_weight_checksums())

    @property
    def has_weights(self) -> bool:
        """Whether requests are answered now."""
        return self._unavailable is None

    def invalidate(self, why: str) -> None:
        """Declares the weights invalid until the next complete update."""
        self._unavailable = f"without valid weights ({why}); apply a publication"

    # Life ----------------------------------------------------------------------------------------------------------

    async def sleep(self, level: int = 2) -> None:
        """Gives up the cache and the weights (a GPU's memory); level 1 keeps the weights in the host's memory. Running
        requests keep their places, new ones wait, until `wake_cache`.

        Raises:
            EngineError: level 2, and the engine serves an adapter: no publication would bring the weights below it back.
        """
        if self.adapter is not None and level > 1:
            raise EngineError(f"engine {self.name} serves an adapter and cannot give its weights up; sleep at level 1")
        async with self.updating, self._pausing:
            if self._asleep != "no":
                return
            self._open.clear()
            self._asleep = "wholly"  # also if it breaks off: nobody knows then what is where
            if level > 1:
                self.invalidate("asleep")
            with self._naming_death():
                await self._alive().sleep(level=level, mode="keep")

    async def wake_weights(self) -> None:
        """Takes the weights' memory back, and only that. After level 2 no weights are in it: apply a publication."""
        async with self._pausing:
            if self._asleep == "wholly":
                with self._naming_death():
                    await self._alive().wake_up(tags=["weights"])
                self._asleep = "but_for_weights"

    async def wake_cache(self) -> None:
        """Takes the cache's memory back: requests go on, computing their context anew; without valid weights they are ended."""
        async with self._pausing:
            if self._asleep != "but_for_weights":
                return
            with self._naming_death():
                if not self.has_weights:
                    await self._alive().pause_generation(mode="abort", clear_cache=False)
                await self._alive().wake_up(tags=["kv_cache"])
            self._asleep = "no"
            self._open.set()

    @property
    def is_asleep(self) -> bool:
        """Whether requests wait for `wake_cache`."""
        return self._asleep != "no"

    async def check(self) -> None:
        """Raises EngineDied when the engine's process is gone."""
        with self._naming_death():
            await self._alive().check_health()

    async def answer(self) -> None:
        """Returns when the engine's process, between two of its steps, has answered."""
        with self._naming_death():
            await self._alive().get_weight_version()

    async def stop(self) -> None:
        """Ends the engine's process; running requests fail."""
        llm, self._llm = self._llm, None
        self.invalidate("stopped")
        self._open.set()  # who waits for an engine that sleeps hears of it
        if llm is not None:
            llm.shutdown()  # on the loop, though it blocks: from a thread, vLLM's output task takes the end for a death
        if self.nodes is not None:
            self.nodes.stop()

    # Errors --------------------------------------------------------------------------------------------------------

    def _alive(self) -> Any:
        if self._llm is None:
            raise EngineDied(f"engine {self.name} was stopped")
        return self._llm

    def _check_has_room(self) -> None:
        if self._asleep == "wholly":
            raise WeightsRefused(f"engine {self.name} keeps version {self.version}: it is asleep; wake it first")

    def _check_available(self) -> None:
        if self._unavailable is not None:
            raise WeightsUnavailable(f"engine {self.name} is {self._unavailable}")

    @contextlib.contextmanager
    def _naming_death(self) -> Iterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            raise EngineDied(f"engine {self.name} died; its process's own output says why") from error

    @contextlib.contextmanager
    def _failing_update(self, *, touched: bool = True) -> Iterator[None]:
        """`touched`: the weights may have been changed when something fails inside."""
        with self._naming_death():
            try:
                yield
            except Exception as error:
                if self._llm is None or self._llm.errored:
                    raise
                if not touched or REFUSED in str(error):
                    raise WeightsRefused(f"engine {self.name} keeps version {self.version}: {error}") from error
                if self.has_weights:
                    self.invalidate("an update broke off")
                raise UpdateFailed(f"engine {self.name}: an update broke off: {error}") from error


async def _in_order(*messages: Awaitable[None]) -> None:
    """Sends all at once, which saves their ways to the engine's process and back; vLLM handles them in this order."""
    for outcome in await asyncio.gather(*messages, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
