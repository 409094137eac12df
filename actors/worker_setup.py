"""What a rollout worker makes of the run's settings before it has an engine: interpreter pool, tools, parser, chat format.

Nothing here starts a process, so a driver makes the same parts first to find what a wrong setting or file would break.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from actors.sandbox_hosts import SandboxHosts
from sandbox import SandboxConfig, SandboxPool
from toolrl import tasks, toolcalls
from toolrl.config import RunConfig
from toolrl.conversation import ChatFormat
from toolrl.monitors.control_tokens import ControlTokens
from toolrl.tasks import TaskSource
from toolrl.toolcalls import Parser
from toolrl.tools import Toolbox


@dataclass(frozen=True)
class Setup:
    """The parts of a worker that need no engine."""

    tokenizer: Any
    sandbox: SandboxPool | SandboxHosts  # not open yet
    toolbox: Toolbox
    parser: Parser
    chat: ChatFormat
    tasks: TaskSource

    @classmethod
    def of(cls, config: RunConfig, model_dir: str | Path, sandbox: SandboxPool | SandboxHosts | None = None) -> Setup:
        """Makes them; reads the tokenizer and the tasks, which takes seconds.

        Args:
            sandbox: one that is there already, in the place of a new one.

        Raises:
            UserError: a file, a name, an option or a chat template that cannot work; says what to change.
        """
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(model_dir, trust_remote_code=config.model.trust_remote_code)
        sandbox = interpreter(config) if sandbox is None else sandbox
        toolbox = Toolbox.build(config.tools, interpreter=sandbox, seed=config.seed)
        parser = toolcalls.get(config.rollout.parser, external=partial(_vllm_parser, tokenizer, toolbox.schemas))
        chat = ChatFormat(
            tokenizer,
            tools=toolbox.schemas,
            chat_template=config.model.chat_template,
            template_options=config.model.template_options,
            on_rewritten_history=config.model.on_rewritten_history,
            parser=parser,
        )
        return cls(tokenizer, sandbox, toolbox, parser, chat, tasks.build(config.tasks, config.seed))


def control_tokens(config: RunConfig, model_dir: str | Path) -> ControlTokens:
    """The tokens that steer the run's model, for who watches them."""
    setup = Setup.of(config, model_dir)
    return ControlTokens.of(setup.tokenizer, setup.chat, setup.parser)


@functools.lru_cache(maxsize=4)
def parser_alone(name: str, model_dir: str) -> Parser:
    """The parser `rollout.parser` by itself, for who only reads what was written."""
    if not name.startswith("vllm:"):
        return toolcalls.get(name)
    from transformers import AutoTokenizer

    return toolcalls.get(name, external=partial(_vllm_parser, AutoTokenizer.from_pretrained(model_dir), []))


def sandbox_config(config: RunConfig) -> SandboxConfig:
    """The interpreter service's own configuration from the run's."""
    wanted = config.sandbox
    return SandboxConfig(
        backend=wanted.backend,
        image=wanted.image,
        runtime=wanted.runtime,
        min_sessions=wanted.min_sessions,
        max_sessions=wanted.max_sessions,
        memory_mib=wanted.memory_mib,
        max_output_bytes=wanted.max_output_bytes,
        preimport=tuple(wanted.preimport),
        run=config.name,
    )


def interpreter(config: RunConfig) -> SandboxPool | SandboxHosts:
    """Where the run's Python runs: a pool in this process, or the run's sandbox hosts. Not open yet."""
    return SandboxHosts(sandbox_config(config)) if hosted(config) else SandboxPool(sandbox_config(config))


def hosted(config: RunConfig) -> bool:
    """Whether the run has sandbox hosts."""
    return config.placement.sandbox == "hosts" and any(tool.name == "python" for tool in config.tools)


def _vllm_parser(tokenizer: Any, schemas: list[dict[str, Any]], name: str) -> Parser:
    from actors.vllm_toolcalls import vllm_parser_factory

    return vllm_parser_factory(tokenizer, schemas)(name)
