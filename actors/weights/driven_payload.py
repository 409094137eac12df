"""Payloads of vLLM's trainers on their way from the worker into its engine's process. Imports no vLLM."""

from __future__ import annotations

import base64
import pickle
import threading
from collections.abc import Mapping
from typing import Any

WITHIN, HANDLES = "within_s", "pickled_handles"


def writable(payload: Mapping[str, Any], within_s: float) -> dict[str, Any]:
    """For vLLM's messages, which carry no memory handles of a GPU unless told to unpickle whatever comes."""
    message = {key: value for key, value in payload.items() if key != "ipc_handles"} | {WITHIN: within_s}
    if payload.get("ipc_handles") is not None:
        message[HANDLES] = base64.b64encode(pickle.dumps(payload["ipc_handles"])).decode()
    return message


def readable(message: Mapping[str, Any]) -> tuple[dict[str, Any], float]:
    """The inverse of `writable`; it comes from this engine's own worker."""
    payload = {key: value for key, value in message.items() if key not in (WITHIN, HANDLES)}
    if HANDLES in message:
        payload["ipc_handles"] = pickle.loads(base64.b64decode(message[HANDLES]))
    return payload, float(message.get(WITHIN, threading.TIMEOUT_MAX))
