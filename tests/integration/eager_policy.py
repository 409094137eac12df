"""A policy of random weights that plays several turns: it ends its turns soon, and whatever it says is read as a call.

Real engines sample it token by token; nothing is trained. The parsers are named by import path in the tests' configs.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from toolrl.app.tiny_model import write_tiny_model
from toolrl.app.tiny_tokenizer import END, build_tokenizer
from toolrl.toolcalls import Parsed, call_id
from toolrl.toolcalls.hermes import Hermes
from toolrl.trajectory import ToolCall

CALLS = 3
# Variables and files that later cells need.
COUNTING = """
import time
n = globals().get("n", 0) + 1
open("log", "a").write("x" * n)
time.sleep(%s)
print("cell", n, "log", len(open("log").read()))
"""


def write_eager_model(folder: Path, seed: int) -> None:
    """The built-in tiny model, changed so that a turn has about seven tokens.

    One direction of its hidden state is made constant, and the end token's output weight there larger than the others':
    a bias of its logit, which the architecture has no place for otherwise.
    """
    write_tiny_model(folder, seed)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    with torch.no_grad():
        embedding = model.model.embed_tokens.weight
        embedding[:, 0] = 6.0
        embedding[build_tokenizer().convert_tokens_to_ids(END), 0] = 6.6
    model.save_pretrained(folder)


class Eager(Hermes):
    """Reads the first `CALLS` turns as calls of python, whatever stands in them."""

    name = "eager"
    sleep_s = 0.0

    def code(self, number: int) -> str:
        return COUNTING % self.sleep_s

    def parse(self, text: str, first_call: int = 0) -> Parsed:
        if first_call >= CALLS:
            return Parsed(text)
        return Parsed(text, [ToolCall(call_id(first_call), "python", {"code": self.code(first_call)})])


class SlowEager(Eager):
    """Its calls take long enough to be interrupted."""

    sleep_s = 0.3


class RestlessEager(Eager):
    """Its second call never gives the same twice."""

    def code(self, number: int) -> str:
        return "import time\ntime.time_ns()" if number == 1 else super().code(number)
