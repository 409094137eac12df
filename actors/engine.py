"""One vLLM engine: token ids in; token ids, log-probabilities and weight versions out. Weights are swapped in mid-generation.

Invariants:
- A log-probability is that of the distribution that the token was drawn from (temperature, top-p and top-k included); a stop
  token that was sampled is part of the tokens.
- Every token carries the version of the weights that produced it, across an update too.
- A prefix-cache entry of one weight version never serves a request that began under another: the version salts the cache.
- An engine without valid weights (asleep, woken without a reload, broken by a failed update) raises; it never makes text.

`docs/engine.md` says what an update means for requests that span it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from actors.engine_setup import (
    Device,
    engine_arguments,
    engine_environment,
    environment,
    resolve_device,
    resolve_transport,
)
from toolrl.config import EngineConfig

REFUSED = "WeightsRefused"  # what a weight-transfer engine's message holds when it left the old weights untouched


class EngineError(RuntimeError):
    """Something is wrong with an engine; the message names it."""


class EngineDied(EngineError):
    """The engine's process is gone: nothing will come from it any more."""


class EngineStartFailed(EngineError):
    """The engine did not come up."""


class WeightsUnavailable(EngineError):
    """The engine lives and holds no valid weights: apply a publication first."""


class WeightsRefused(EngineError):
    """An update was refused before it touched anything; the engine goes on with the weights it had."""


class UpdateFailed(EngineError):
    """An update broke off in the middle; the engine has no valid weights until a later one succeeds."""


@dataclass(frozen=True, slots=True)
class Generated:
    """What one request gave; lists have one entry a sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: str  # "stop", "length" or "abort"
    started_version: int  # the weights' version when the request was submitted: no key or value it attended to is older


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Seconds of one weight update, by part; `paused_s` is how long no token was made."""

    pause_s: float
    load_s: float
    resume_s: float

    @property
    def paused_s(self) -> float:
        return self.pause_s + self.load_s + self.resume_s


class Engine:
    """`await Engine.start(…)` inside the process and event loop that will use it; `await engine.stop()` at the end."""

    def __init__(self, llm: Any, name: str, version: int, keep_kv: bool, device: Device) -> None:
        self.name = name
        self.version = version
        self.device = device
        self._llm = llm
        self._keep_kv = keep_kv
        self._open = asyncio.Event()  # cleared while weights are swapped: requests then wait, to begin under the new ones
        self._open.set()
        self._unavailable: str | None = None  # why no text may be made now
        self._update_lock = asyncio.Lock()

    @classmethod
    async def start(
        cls,
        model_dir: str | Path,
        config: EngineConfig,
        *,
        dtype: str,
        max_context_tokens: int,
        seed: int,
        name: str = "engine",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        transport: Literal["auto", "shared_memory", "nccl", "ipc"] = "auto",
        version: int = 0,
        kv_across_updates: Literal["keep", "recompute"] = "keep",
        sleepable: bool = False,
    ) -> Engine:
        """Loads the model, starts vLLM's processes and makes the first token, so that the first request is a fast one.

        Blocks the event loop while it loads. `version` labels the weights in `model_dir`.

        Raises:
            EngineStartFailed: with vLLM's reason.
        """
        resolved = resolve_device(device)
        arguments = engine_arguments(
            model_dir,
            config,
            device=resolved,
            dtype=dtype,
            max_context_tokens=max_context_tokens,
            seed=seed,
            transport=resolve_transport(transport, resolved),
            sleepable=sleepable,
        )
        try:
            with environment(engine_environment(config, device=resolved)):
                from vllm.engine.arg_utils import AsyncEngineArgs
                from vllm.v1.engine.async_llm import AsyncLLM

                llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        except Exception as error:
            raise EngineStartFailed(f"engine {name} on {model_dir} did not start: {error}") from error
        engine = cls(llm, name, version, kv_across_updates == "keep", resolved)
        try:
            await llm.update_weight_version(str(version))
            await engine.generate([0], max_tokens=1, temperature=1.0, stop_token_ids=[], request_id="warm-up")
        except BaseException:
            await engine.stop()
            raise
        return engine

    # Generation ----------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = -1,
        stop_token_ids: Sequence[int],
        seed: int | None = None,
        request_id: str,
    ) -> Generated:
        """Samples until a stop token or a limit. Temperature 0 is greedy. Cancelling the call aborts the request.

        Raises:
            EngineDied, WeightsUnavailable: see the classes.
            ValueError: the prompt is empty or leaves no room in the context.
        """
        from vllm import SamplingParams
        from vllm.inputs.engine import tokens_input
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=list(stop_token_ids),
            seed=seed,
            logprobs=0,  # the sampled token's alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        await self._open.wait()
        self._check_available()
        started_version = self.version
        prompt = tokens_input(list(prompt_ids), cache_salt=f"weights-{started_version}")
        with self._naming_death():
            async for output in self._llm_alive().generate(prompt, params, request_id):
                completion = output.outputs[0]
        if completion.finish_reason in ("abort", "error"):
            self._check_available()
        if completion.finish_reason == "error":
            raise EngineError(f"engine {self.name}: request {request_id} failed inside vLLM; see the engine's log")
        return Generated(
            token_ids=list(completion.token_ids),
            logprobs=list(completion.logprobs.logprobs) if completion.logprobs is not None else [],
            weight_versions=[int(s.version) for s in completion.weight_versions or () for _ in range(s.start, s.end)],
            finish_reason=completion.finish_reason,
            started_version=started_version,
        )

    async def abort(self, request_id: str) -> None:
        """Ends a request; its `generate` returns what was sampled so far with finish reason `abort`."""
        with self._naming_death():
            await self._llm_alive().abort(request_id)

    # Weights -------------------------------------------------------------------------------------------------------

    async def update_weights(self, version: int, payloads: Sequence[Mapping[str, Any]]) -> UpdateTimes:
        """Pauses generation, hands `payloads` to the engine's weight-transfer engine, labels the weights, resumes.

        Running requests stay where they are and go on with the new weights.

        Raises:
            WeightsRefused: nothing was changed. UpdateFailed: the engine has no valid weights now. EngineDied.
        """
        async with self._update_lock:
            started = time.monotonic()
            async with self.paused():
                paused = time.monotonic()
                await self.begin_update()
                for payload in payloads:
                    await self.transfer(payload)
                await self.finish_update(version)
                loaded = time.monotonic()
            return UpdateTimes(paused - started, loaded - paused, time.monotonic() - loaded)

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No token is made inside; requests keep their places. They resume only under valid weights, else they are aborted."""
        self._open.clear()
        try:
            with self._naming_death():
                await self._llm_alive().pause_generation(mode="keep", clear_cache=not self._keep_kv)
            try:
                yield
            finally:
                with self._naming_death():
                    if self._unavailable is not None:
                        await self._llm_alive().pause_generation(mode="abort", clear_cache=True)
                    await self._llm_alive().resume_generation()
        finally:
            self._open.set()

    async def begin_update(self) -> None:
        """First step of an update; the steps are apart for trainers that drive vLLM's own transports (see docs/weights.md)."""
        with self._naming_death():
            await self._llm_alive().start_weight_update()

    async def transfer(self, payload: Mapping[str, Any]) -> None:
        """Second step, as often as the transport has payloads."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._failing_update():
            await self._llm_alive().update_weights(WeightTransferUpdateRequest(update_info=dict(payload)))

    async def finish_update(self, version: int) -> None:
        """Last step: the weights are complete and are `version` from here on."""
        with self._failing_update():
            await self._llm_alive().finish_weight_update(weight_version=str(version))
        self.version, self._unavailable = version, None

    async def trainer_step(self, name: str, argument: Any) -> None:
        """A step that a trainer outside drives over RPC: `init`, `start`, `update`, `finish`, or `cancel` after an error.

        Generation is paused from `start` to `finish` or `cancel`.
        """
        if name == "init":
            await self.init_transfer(argument)
        elif name == "start":
            await self._update_lock.acquire()
            self._pause = contextlib.AsyncExitStack()
            await self._pause.enter_async_context(self.paused())
            await self.begin_update()
        elif name == "update":
            await self.transfer(argument)
        elif name == "finish":
            await self.finish_update(int(argument))
            await self._end_pause()
        elif name == "cancel":
            self._unavailable = self._unavailable or "without valid weights, since its trainer broke off; apply a publication"
            await self._end_pause()
        else:
            raise ValueError(f"engine {self.name}: unknown step {name!r} of a weight update")

    async def _end_pause(self) -> None:
        try:
            await self._pause.aclose()
        finally:
            self._update_lock.release()

    async def init_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Connects the engine to a trainer, for transports that have a connection."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        with self._naming_death():
            await self._llm_alive().init_weight_transfer_engine(WeightTransferInitRequest(init_info=dict(init_info)))

    async def checksums(self) -> list[dict[str, str]]:
        """vLLM's SHA-256 of every parameter as the engine holds it (packed for the device), one mapping a tensor-parallel rank."""
        with self._naming_death():
            return list(await self._llm_alive().compute_weight_checksums())

    # Life ----------------------------------------------------------------------------------------------------------

    async def sleep(self) -> None:
        """Gives up weights and cache (a GPU's memory); running requests are aborted."""
        self._unavailable = "asleep; call wake() and apply a publication"
        with self._naming_death():
            await self._llm_alive().sleep(level=2, mode="abort")

    async def wake(self) -> None:
        """Takes the memory back. What is in it are no weights: apply a publication before the next request."""
        self._unavailable = "awake without weights; apply a publication"
        with self._naming_death():
            await self._llm_alive().wake_up()

    async def check(self) -> None:
        """Raises EngineDied when the engine's processes are gone."""
        with self._naming_death():
            await self._llm_alive().check_health()

    async def stop(self) -> None:
        """Ends the engine's processes; running requests fail."""
        llm, self._llm, self._unavailable = self._llm, None, "stopped"
        if llm is not None:
            # On the loop, though it blocks: from a thread, vLLM's output task takes the end for an engine's death.
            llm.shutdown()

    @property
    def has_weights(self) -> bool:
        """Whether requests are answered now."""
        return self._unavailable is None

    # Errors --------------------------------------------------------------------------------------------------------

    def _llm_alive(self) -> Any:
        if self._llm is None:
            raise EngineDied(f"engine {self.name} was stopped")
        return self._llm

    def _check_available(self) -> None:
        if self._unavailable is not None:
            raise WeightsUnavailable(f"engine {self.name} is {self._unavailable}")

    @contextlib.contextmanager
    def _naming_death(self) -> Iterator[None]:
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            yield
        except EngineDeadError as error:
            raise EngineDied(f"engine {self.name} died: {error.__cause__ or error}") from error

    @contextlib.contextmanager
    def _failing_update(self) -> Iterator[None]:
        with self._naming_death():
            try:
                yield
            except Exception as error:
                if REFUSED in str(error):
                    raise WeightsRefused(f"engine {self.name} kept version {self.version}: {error}") from error
                if self._llm_alive().errored:
                    raise
                self._unavailable = "without valid weights, since an update broke off; apply a publication"
                raise UpdateFailed(f"engine {self.name}: the update of version {self.version} broke off: {error}") from error
