"""The laptop model's tokenizer: byte-level BPE of 512 tokens, trained here on its conversations' phrases.

Invariants:
- Any text has an encoding, and decoding gives it back: all 256 bytes are tokens.
- Every digit is a token of its own, so that a number can be copied digit by digit.
- Every chat and tool tag is one token, and no token reaches across the end of a line: what is sampled after a
  template's newline has the same ids whether it is tokenised alone or with it.
- The result depends on this file alone, on no seed and no download.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerFast

VOCABULARY_SIZE = 512
PAD = "<|endoftext|>"
END = "<|im_end|>"
TAGS = [
    PAD,
    "<|im_start|>",
    END,
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
    "<think>",
    "</think>",
]

# A digit; else a piece of a line with its newline. Pieces are not cut at spaces: a phrase that occurs in every
# conversation becomes a few tokens, which makes cold start, rollouts and updates on a laptop several times faster.
_PIECE = r"\d|[^\d\n]*\n|[^\d\n]+"

# What is said, with about how often in a thousand conversations: BPE spends its merges where they save most.
_PHRASES: list[tuple[int, list[str]]] = [
    (
        1000,
        [
            "system\n",
            "user\n",
            "assistant\n",
            "Tools: python(code)",
            "Use python. ",
            "Answer in \\boxed{}.",
            "\\boxed{",
            '{"name": "python", "arguments": {"code": "',
        ],
    ),
    (
        330,
        [
            "State the final answer to the following arithmetic problem: ",
            "Find the Greatest Common Divisor (GCD) of these numbers: ",
            ". Give only the GCD as your final answer.",
            "Solve the following multiplication: ",
            ". Give only the result as your final answer.",
            " + ",
            " - ",
            " * ",
            ", ",
            " =",
            "print(",
            ')"}}\n',
            "import math; print(math.gcd(",
            '))"}}\n',
        ],
    ),
    (
        30,
        [
            "Error: python busy, try again",
            "Error: connection to python was reset, try again",
            "Error: python is temporarily unavailable (",
            "), try again",
            "Error: < /tool_call> is missing after the JSON object",
            "Error: invalid JSON: Expecting ',' delimiter at character ",
            " of the call",
        ],
    ),
    (
        2,
        [
            "Find the Least Common Multiple (LCM) of these numbers: ",
            "import math; print(math.lcm(",
            "Traceback (most recent call last):\n",
            '  File "<cell ',
            '>", line ',
            "NameError: name '",
            "' is not defined",
            "SyntaxError: ",
            "<python>\n",
            "</python>",
            "```python\n",
            "Calculate ",
        ],
    ),
]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer: a few milliseconds, the same result each time."""
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=TAGS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[tag for tag in TAGS if tag not in (PAD, END)],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = resources.files("toolrl.app").joinpath("tiny_chat_template.jinja").read_text()
    return fast


def _corpus() -> Iterator[str]:
    for count, phrases in _PHRASES:
        for phrase in phrases:
            for _ in range(count):
                yield phrase
