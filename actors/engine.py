"""One vLLM engine: token ids in; token ids, log-probabilities and weight versions out. Weights are swapped in
mid-generation.

Invariants:
- A log-probability is that of the distribution that the token was drawn from (temperature, top-p and top-k included);
  a stop token that was sampled is part of the tokens.
- Every token carries the version of the weights that produced it, across an update too.
- A prefix-cache entry of one weight version never serves a request that began under another: the version salts the
  cache.
- An engine without valid weights (asleep, woken without a reload, broken by a failed update) raises; it never makes
  text.

`docs/engine.md` says what an update means for requests that span it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from actors.engine_errors import (
    REFUSED,
    EngineDied,
    EngineError,
    EngineStartFailed,
    UpdateFailed,
    WeightsRefused,
    WeightsUnavailable,
)
from actors.engine_setup import engine_arguments, engine_environment, environment, resolve_device, resolve_transport
from toolrl.config import EngineConfig

__all__ = ["Engine", "EngineDied", "EngineError", "EngineStartFailed", "Generated", "UpdateTimes", "WeightsUnavailable"]


@dataclass(frozen=True, slots=True)
class Generated:
    """What one request gave; lists have one entry a sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: str  # "stop", "length" or "abort"
    started_version: int  # the version when the request was submitted: no key or value that it attended to is older


@dataclass(frozen=True, slots=True)
class UpdateTimes:
    """Seconds of one weight update, by part."""

    pause_s: float
    load_s: float
    resume_s: float

    @property
    def paused_s(self) -> float:
        """How long no token was made."""
        return self.pause_s + self.load_s + self.resume_s


class Engine:
    """`await Engine.start(…)` inside the process and event loop that will use it; `await engine.stop()` at the end."""

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
        self._pausing = asyncio.Lock()

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
        """Loads the model, starts vLLM's process and makes the first token, so that the first request is a fast one.

        `version` labels the weights in `model_dir`. `kv_across_updates`: what becomes of the keys and values of
        requests that span an update. Blocks the loop while the process starts, about 7 s on a CPU. The starting
        program needs the `if __name__ == "__main__"` guard.

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
                # Importing takes seconds and goes to a thread. The process is started from the loop's own thread: it
                # ends with the thread that started it (`actors.weights.plugin`).
                vllm_engine = await asyncio.to_thread(importlib.import_module, "vllm.v1.engine.async_llm")
                vllm_arguments = importlib.import_module("vllm.engine.arg_utils")
                engine = cls(
                    vllm_engine.AsyncLLM.from_engine_args(vllm_arguments.AsyncEngineArgs(**arguments)),
                    name,
                    version,
                    max_context_tokens=max_context_tokens,
                    keep_kv=kv_across_updates == "keep",
                )
        except Exception as error:
            raise EngineStartFailed(
                f"engine {name} on {model_dir} did not start: {error}; the process's own output says more"
            ) from error
        try:
            await engine._alive().update_weight_version(str(version))
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

        if not 0 < len(prompt_ids) < self.max_context_tokens:
            raise ValueError(
                f"engine {self.name}: request {request_id} has a prompt of {len(prompt_ids)} tokens; it must have at "
                f"least one and leave room in the context of {self.max_context_tokens} (rollout.max_context_tokens)"
            )
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            stop_token_ids=list(stop_token_ids),
            ignore_eos=True,  # only what the caller names ends a request, not what the model folder names
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
            async for output in self._alive().generate(prompt, params, request_id):
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
            await self._alive().abort(request_id)

    # Weights -------------------------------------------------------------------------------------------------------

    async def update_weights(self, version: int, payloads: Sequence[Mapping[str, Any]]) -> UpdateTimes:
        """Pauses generation, hands `payloads` to vLLM's weight-transfer engine, labels the weights `version`, resumes.

        Running requests stay where they are and go on with the new weights.

        Raises:
            WeightsRefused: nothing was changed. UpdateFailed: the engine has no valid weights now. EngineDied.
        """
        started = time.monotonic()
        async with self.paused():
            paused = time.monotonic()
            try:
                await self.begin_update()
                for payload in payloads:
                    await self.transfer(payload)
                await self.finish_update(version)
            except UpdateFailed as error:
                await self.abandon_update(str(error))
                raise
            loaded = time.monotonic()
        return UpdateTimes(paused - started, loaded - paused, time.monotonic() - loaded)

    @contextlib.asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """No token is made inside. Requests keep their places; if the weights end up invalid, they are aborted."""
        async with self._pausing:
            self._open.clear()
            try:
                with self._naming_death():
                    await self._alive().pause_generation(mode="keep", clear_cache=not self._keep_kv)
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
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        with self._failing_update():
            await self._alive().update_weights(WeightTransferUpdateRequest(update_info=dict(payload)))

    async def finish_update(self, version: int) -> None:
        """Last step: the weights are complete and are `version` from here on."""
        with self._failing_update():
            await self._alive().finish_weight_update(weight_version=str(version))
        self.version, self._unavailable = version, None

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

    async def sleep(self) -> None:
        """Gives up weights and cache (a GPU's memory); running requests are aborted."""
        self.invalidate("asleep")
        with self._naming_death():
            await self._alive().sleep(level=2, mode="abort")

    async def wake(self) -> None:
        """Takes the memory back. What is in it are no weights: apply a publication before the next request."""
        with self._naming_death():
            await self._alive().wake_up()

    async def check(self) -> None:
        """Raises EngineDied when the engine's process is gone."""
        with self._naming_death():
            await self._alive().check_health()

    async def stop(self) -> None:
        """Ends the engine's process; running requests fail."""
        llm, self._llm = self._llm, None
        self.invalidate("stopped")
        if llm is not None:
            llm.shutdown()  # on the loop, though it blocks: from a thread, vLLM's output task takes the end for a death

    # Errors --------------------------------------------------------------------------------------------------------

    def _alive(self) -> Any:
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
            raise EngineDied(f"engine {self.name} died; its process's own output says why") from error

    @contextlib.contextmanager
    def _failing_update(self) -> Iterator[None]:
        with self._naming_death():
            try:
                yield
            except Exception as error:
                if self._llm is None or self._llm.errored:
                    raise
                if REFUSED in str(error):
                    raise WeightsRefused(f"engine {self.name} keeps version {self.version}: {error}") from error
                if self.has_weights:
                    self.invalidate("an update broke off")
                raise UpdateFailed(f"engine {self.name}: an update broke off: {error}") from error
