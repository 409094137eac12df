"""Tools: what the policy may call between its turns.

`Toolbox.build(configs, interpreter, seed)` makes the tools of a run once per worker; `toolbox.session(episode_id)`
gives an episode its own. Importing this package registers the tools that come with toolrl.
"""

from __future__ import annotations

from toolrl.tools import calculator, mcp_client, python, search
from toolrl.tools.protocol import (
    Execution,
    InfraError,
    Interpreter,
    InterpreterSession,
    Tool,
    ToolMaker,
    ToolSchema,
    ToolSession,
    function_schema,
    tools,
)
from toolrl.tools.toolbox import Toolbox, ToolboxSession

__all__ = [
    "Execution",
    "InfraError",
    "Interpreter",
    "InterpreterSession",
    "Tool",
    "ToolMaker",
    "ToolSchema",
    "ToolSession",
    "Toolbox",
    "ToolboxSession",
    "function_schema",
    "tools",
]

_BUILT_IN = (calculator, mcp_client, python, search)  # importing them registers their tools
