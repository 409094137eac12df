"""What a vLLM trainer gives its engines travels through vLLM's messages, which take plain values only."""

from __future__ import annotations

import json

import torch

from actors.weights.driven_payload import readable, writable


def test_memory_handles_travel_as_text() -> None:
    handles = {"GPU-1": (torch.Tensor, torch.Size([4]), torch.float32, 0, b"handle", 16)}
    payload = {
        "names": ["a"],
        "dtype_names": ["float32"],
        "shapes": [[4]],
        "ipc_handles": handles,
        "tensor_sizes": [16],
    }
    message = json.loads(json.dumps(writable(payload, 3.0)))
    assert readable(message) == (payload, 3.0)


def test_what_has_no_handles_is_as_it_was_but_for_its_time() -> None:
    payload = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[4]]}
    assert writable(payload, 2.0) == payload | {"within_s": 2.0}
    assert readable(writable(payload, 2.0)) == (payload, 2.0)
