"""One vLLM engine: token ids in; token ids, log-probabilities and weight versions out. Weights are swapped in
mid-generation.

Invariants:
- A log-probability is that of the distribution that the token was drawn from (temperature, top-p and top-k included);
  a stop token that was sampled is part of the tokens.
- Every token carries the version of the weights that produced it, across an update too.
- A prefix-cache entry of one weight version never serves a request that began under another: the version salts the
  cache.
- An engine without valid weights (woken without a reload, broken by a failed update) raises; it never makes text. While
  it sleeps, requests wait.

`docs/engine.md` says what an update means for requests that span it.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from actors.engine_errors import EngineDied, EngineError, EngineStartFailed, WeightsUnavailable
from actors.engine_nodes import EngineNodes, host_variables, meeting_point
from actors.engine_setup import engine_arguments, engine_environment, environment, resolve_device
from actors.living_engine import LivingEngine, UpdateTimes
from actors.own_output import last_errors
from actors.weights.served_adapter import ServedAdapter
from toolrl.config import EngineConfig, LoraConfig
from toolrl.weight_transport import Transport

if TYPE_CHECKING:
    from actors.node_groups import PlacementGroup

__all__ = ["Engine", "EngineDied", "EngineError", "EngineStartFailed", "Generated", "UpdateTimes", "WeightsUnavailable"]


@dataclass(frozen=True, slots=True)
class Generated:
    """What one request gave; lists have one entry a sampled token."""

    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: str  # "stop", "length" or "abort"
    started_version: int  # the version when the request was submitted: no key or value that it attended to is older


class Engine(LivingEngine):
    """`await Engine.start(…)` inside the process and event loop that will use it; `await engine.stop()` at the end."""

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
        transport: Transport = "shared_memory",
        version: int = 0,
        kv_across_updates: Literal["keep", "recompute"] = "keep",
        sleepable: bool = False,
        adapter: LoraConfig | None = None,
        places: PlacementGroup | None = None,
    ) -> Engine:
        """Loads the model, starts vLLM's process and makes the first token, so that the first request is a fast one.

        `version` labels the weights in `model_dir`. `kv_across_updates`: what becomes of the keys and values of
        requests that span an update. `adapter`: the engine serves the folder's weights and one adapter of this kind over
        them, which changes nothing until it is given another. `places`: of an engine over several nodes, one bundle a node, of
        which this process has the first. Blocks the loop while the process starts, about
        7 s on a CPU. The starting program needs the `if __name__ == "__main__"` guard.

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
            transport=transport,
            sleepable=sleepable,
            adapter=adapter,
            meeting=meeting_point() if config.nodes > 1 else None,
        )
        variables = engine_environment(config, device=resolved)
        nodes = None
        if config.nodes > 1:
            nodes = EngineNodes.begin(name, config, places, arguments, variables, device=resolved)
        try:
            with environment(variables | (host_variables() if nodes is not None else {})):
                # Importing takes seconds and goes to a thread. The process is started from the loop's own thread: it
                # ends with the thread that started it (`actors.weights.plugin`).
                executor = await asyncio.to_thread(importlib.import_module, "actors.engine_executor")
                engine = cls(
                    executor.started(arguments),
                    name,
                    version,
                    max_context_tokens=max_context_tokens,
                    keep_kv=kv_across_updates == "keep",
                )
                engine.nodes = nodes
                if nodes is not None:
                    await nodes.ready()
        except Exception as error:
            if nodes is not None:
                nodes.stop()
            printed = " | ".join(await asyncio.to_thread(last_errors)) or "the process's own output says more"
            raise EngineStartFailed(f"engine {name} on {model_dir} did not start: {error}; {printed}") from error
        try:
            await engine._alive().update_weight_version(str(version))
            if adapter is not None:
                engine.adapter = await ServedAdapter.begin(engine, str(model_dir), adapter)
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
            over = self.adapter.request if self.adapter is not None else None
            async for output in self._alive().generate(prompt, params, request_id, lora_request=over):
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
