"""Multi-turn episodes on a real engine against raw vLLM that makes the same number of tokens from the same contexts.

A tiny model first learns one conversation by heart (four calls of the calculator, then an answer), so its episodes are real ones:
sampled, parsed, run, rendered, scored. The raw side is given every context of those episodes and the lengths that were sampled,
with the same sampling settings, the turns of an episode one after the other as in the episode. Before each turn of each side the
prefix cache is emptied.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from actors.engine import Engine
from actors.episode import EpisodeRunner
from actors.seat import Seat
from toolrl import toolcalls
from toolrl.app.tiny_model import write_tiny_model
from toolrl.config import EngineConfig, RewardConfig, RolloutConfig, TaskConfig, ToolConfig
from toolrl.conversation import ChatFormat
from toolrl.rewards import RewardPipeline
from toolrl.tasks import AnswerChecker, Task
from toolrl.tools import Toolbox
from toolrl.trajectory import ToolCall, ToolResult, Trajectory, Turn

EPISODES, CALLS, CONTEXT = 64, 4, 512
ROUNDS = 4
TEMPERATURE = 0.3  # the conversation known by heart comes out, now and then with a slip
SYSTEM = "Use the calculator. Answer in \\boxed{}."
CALL = ToolCall("call_0", "calculator", {"expression": "12 + 34"})


class Request(NamedTuple):
    """One turn of an episode: what vLLM is to continue, and by how many tokens."""

    context: list[int]
    tokens: int
    seed: int


def run() -> dict[str, Any]:
    """`rows`: tokens/s and the episodes' share of it, by the clock and by processor seconds, medians over rounds."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder)))


async def _measure(folder: Path) -> dict[str, Any]:
    before = os.getloadavg()[0]
    write_tiny_model(folder, 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    parser, toolbox = toolcalls.get("hermes"), Toolbox.build([ToolConfig("calculator")], None, 0)
    chat = ChatFormat(tokenizer, tools=toolbox.schemas, parser=parser)
    learn_by_heart(folder, chat)
    config = RolloutConfig(max_turns=8, max_turn_tokens=64, max_response_tokens=400, max_context_tokens=CONTEXT)
    config.temperature = TEMPERATURE
    settings = EngineConfig(kv_cache_gib=0.5, max_concurrent_requests=EPISODES)
    async with AsyncExitStack() as stack:
        checker = await stack.enter_async_context(AnswerChecker(TaskConfig(verifier_processes=1)))
        engine = await Engine.start(folder, settings, dtype="float32", max_context_tokens=CONTEXT, seed=0, device="cpu")
        stack.push_async_callback(engine.stop)
        rewards = RewardPipeline(RewardConfig(), checker)
        runner = EpisodeRunner(
            engine, chat, parser, toolbox, rewards, config, tokenizer=tokenizer, answer=TaskConfig().answer
        )
        return {"load before": before, **await _compare(runner, engine), "load after": os.getloadavg()[0]}


async def _compare(runner: EpisodeRunner, engine: Engine) -> dict[str, Any]:
    played = await play(runner)  # warms both up
    chains = [requests_of(trajectory) for trajectory in played]
    tokens = sum(request.tokens for chain in chains for request in chain)
    ways: dict[str, Callable[[int], Awaitable[Any]]] = {
        "episodes": lambda number: play(runner),
        "raw, same settings": lambda number: raw(engine, chains, f"same-{number}", exact=True),
        "raw, no seeds, no log-probabilities": lambda number: raw(engine, chains, f"bare-{number}", exact=False),
    }
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(ROUNDS):
        for name, way in ways.items():
            await engine._alive().reset_prefix_cache()
            clock, processor = time.perf_counter(), processor_s()
            await way(number)
            spent[name].append((time.perf_counter() - clock, processor_s() - processor))
    own = spent["episodes"]
    return {
        "episodes": EPISODES,
        "turns an episode": statistics.fmean(len(chain) for chain in chains),
        "sampled tokens": tokens,
        "rows": [
            {
                "way": name,
                "tokens/s": statistics.median(tokens / clock for clock, _ in times),
                "tokens/processor s": statistics.median(tokens / processor for _, processor in times),
                "episodes' share": statistics.median(t[0] / o[0] for t, o in zip(times, own, strict=True)),
                "share by processor": statistics.median(t[1] / o[1] for t, o in zip(times, own, strict=True)),
            }
            for name, times in spent.items()
        ],
    }


async def play(runner: EpisodeRunner) -> list[Trajectory]:
    """All episodes at once."""
    tasks = [
        Task(f"t{i}", "sum", _messages(i), ground_truth="46", metadata={}, verifier="math") for i in range(EPISODES)
    ]
    seats = [Seat(f"g{i}", 0, seed=i) for i in range(EPISODES)]
    return list(await asyncio.gather(*map(runner.run, tasks, seats)))


def requests_of(trajectory: Trajectory) -> list[Request]:
    """What was asked of the engine, turn by turn."""
    seat, context, found = Seat(trajectory.group_id, 0, int(trajectory.group_id[1:])), trajectory.prompt_ids, []
    for turn in trajectory.turns:
        if turn.kind == "policy":
            found.append(Request(list(context), len(turn.token_ids), seat.turn_seed(len(found))))
        context = context + turn.token_ids
    return found


async def raw(engine: Engine, chains: Sequence[Sequence[Request]], name: str, *, exact: bool) -> None:
    """AsyncLLM alone. `exact`: the seeds and log-probabilities that episodes ask for."""
    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind

    llm = engine._alive()

    async def one(number: int, chain: Sequence[Request]) -> None:
        for index, request in enumerate(chain):
            params = SamplingParams(
                max_tokens=request.tokens,
                temperature=TEMPERATURE,
                seed=request.seed if exact else None,
                logprobs=0 if exact else None,
                flat_logprobs=exact,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,
            )
            async for _ in llm.generate(tokens_input(request.context), params, f"{name}-{number}-{index}"):
                pass

    await asyncio.gather(*(one(number, chain) for number, chain in enumerate(chains)))


def processor_s() -> float:
    """Processor seconds of this process and the engine's, so far."""
    import psutil

    own = psutil.Process()
    times = [process.cpu_times() for process in [own, *own.children(recursive=True)]]
    return sum(each.user + each.system for each in times)


def learn_by_heart(folder: Path, chat: ChatFormat, steps: int = 120, calls: int = CALLS, system: str = SYSTEM) -> None:
    """Teaches the model in `folder` the conversation with so many calls, whatever the question."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.0)
    for step in range(steps):
        ids, wanted = _conversation(chat, step, calls, system)
        logits = model(input_ids=ids[None], use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(logits, wanted[1:], ignore_index=-100).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 4e-3 * (1 - step / steps)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)


def _conversation(chat: ChatFormat, number: int, calls: int, system: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, the same with -100 for what the policy does not say)."""
    ids = chat.prompt_ids(_messages(number, system))
    wanted = [-100] * len(ids)
    call, answer = chat.assistant_ids("", [CALL]), chat.assistant_ids("\\boxed{46}")
    for said in [call] * calls + [answer]:
        ids, wanted = ids + said, wanted + said
        if said is call:
            result = ToolResult(CALL.id, CALL.name, "ok", "46")
            shown = chat.observation_ids(Turn("policy", said), [result])
            ids, wanted = ids + shown, wanted + [-100] * len(shown)
    return torch.tensor(ids), torch.tensor(wanted)


def _messages(number: int, system: str = SYSTEM) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": system},
        {"role": "user", "content": f"Calculate {10 + 7 * number % 90} + {10 + 13 * number % 90}."},
    ]


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
