"""What can be wrong with an engine. Every message names the engine."""

from __future__ import annotations

# Stands in an error's text where a weight-transfer engine refused an update and left the old weights untouched: vLLM
# hands errors over from its own processes as text only.
REFUSED = "WeightsRefused"


class EngineError(RuntimeError):
    """Something is wrong with an engine."""


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
