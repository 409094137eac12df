"""vLLM's start, with one difference for engines of several processes: a call that fails in one of them leaves nothing behind.

vLLM (0.32) stops reading answers at the first error, and the next call takes those that are left for its own: after a refused
update every process but the first would be one answer behind for ever. Here each queue knows what it still owes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor


def started(arguments: Mapping[str, Any]) -> AsyncLLM:
    """What `AsyncLLM.from_engine_args` makes, with our executor in the place of vLLM's own of several processes."""
    engine_arguments = AsyncEngineArgs(**arguments)
    config = engine_arguments.create_engine_config()
    executor = Executor.get_class(config)
    return AsyncLLM(
        vllm_config=config,
        executor_class=InStepExecutor if executor is MultiprocExecutor else executor,
        log_requests=engine_arguments.enable_log_requests,
        log_stats=not engine_arguments.disable_log_stats,
    )


class InStepExecutor(MultiprocExecutor):  # type: ignore[misc]
    """See the module."""

    response_mqs: list[Any]

    def _init_executor(self) -> None:
        super()._init_executor()
        self.response_mqs = [Answering(queue) for queue in self.response_mqs]

    def collective_rpc(self, method: Any, *arguments: Any, **options: Any) -> Any:
        aggregated = options.get("kv_output_aggregator") or options.get("ec_output_aggregator")
        rank = None if aggregated else options.get("unique_reply_rank")
        for queue in self.response_mqs if rank is None else [self.response_mqs[rank]]:
            queue.owed += 1
        try:
            return super().collective_rpc(method, *arguments, **options)
        except Exception:
            for queue in self.response_mqs:
                queue.give_up()
            raise


class Answering:
    """One process's queue of answers; otherwise as vLLM's `MessageQueue`."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.owed = 0  # answers to calls that wait for them
        self._stale = 0  # answers to calls that have failed

    def dequeue(self, timeout: float | None = None) -> Any:
        """The answer to the oldest call that still waits for one."""
        while self._stale:
            self._queue.dequeue(timeout=timeout)
            self._stale -= 1
        answer = self._queue.dequeue(timeout=timeout)
        self.owed -= 1
        return answer

    def give_up(self) -> None:
        """Nobody waits for what is owed any more."""
        self._stale, self.owed = self._stale + self.owed, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
