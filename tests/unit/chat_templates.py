"""The chat templates of the package trl and a tokenizer trained here, each template's special tokens added to it."""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from toolrl.conversation import ChatFormat, TemplateRefused

DOCS = Path(__file__).parents[2] / "docs" / "chat-templates.md"

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "python",
            "description": "Runs Python code.",
            "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
        },
    }
]
_SPECIAL = re.compile(
    r"<[|｜][^<>|｜\s'\"{}]+[|｜]>|<\|[a-z_]+>|<[a-z_]+\|>|<\|\"\|>|<(?:start|end)_of_\w+>|</s>|</?(?:think|tool_call|tool_response)>"
)
# End-of-text tokens as the model families have them, the first that the template mentions; else a token of its own.
_EOS = [
    "<|im_end|>",
    "<|eot_id|>",
    "<|return|>",
    "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
    "<|eot|>",
    "<end_of_utterance>",
    "</s>",
]
# How Llama 3, Qwen and most others since split text before BPE.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = [
    'You are a helpful assistant. Use the tools. def main(): print("hello") return x == 1\n\n',
    '{"type": "function", "function": {"name": "python", "arguments": {"code": "print(2+2)"}}}\n',
    "<|start|>user assistant system tool\n\n<b> the answer is 42, and so on.\n",
]


def templates() -> dict[str, str]:
    """Template texts by name."""
    spec = importlib.util.find_spec("trl")
    assert spec and spec.origin
    folder = Path(spec.origin).parent / "chat_templates"
    return {path.stem: path.read_text() for path in sorted(folder.glob("*.jinja"))}


@functools.cache
def _trained() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS * 20, trainer)
    text: str = tokenizer.to_str()
    return text


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """A fresh tokenizer with this template and its special tokens."""
    backend = Tokenizer.from_str(_trained())
    found = list(dict.fromkeys(_SPECIAL.findall(template)))
    eos = next((token for token in _EOS if token in template), "<eos>")
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ["<bos>", eos, *found]])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


def table() -> str:
    """What each template does, as a Markdown table."""
    heads = ["template", "verdict", "calls", "results", "thinking", "a turn ends with", "remarks"]
    return "\n".join([_row(heads), "|---" * len(heads) + "|", *(_row(_cells(name)) for name in templates())])


@functools.cache
def format_of(name: str) -> ChatFormat | TemplateRefused:
    """The template as a format that may be split, or why even that is refused."""
    try:
        return ChatFormat(tokenizer_for(templates()[name]), tools=TOOLS, on_rewritten_history="split")
    except TemplateRefused as error:
        return error


def _cells(name: str) -> list[str]:
    chat = format_of(name)
    if isinstance(chat, TemplateRefused):
        return [name, "refused", "", "", "", "", str(chat)]
    how, ends = chat.checked.dialect, chat.checked.deltas.ends
    calls = {"native": "template's" if how.parallel else "template's, one a turn", "text": "in the text"}[how.calls]
    results = {"tool": "tool messages", "user": "user messages"}[how.results]
    field = "in the text" if how.thinking == "inline" else f"`{how.thinking}`"
    thinking = {"optional": field, "opened": f"{field}, opened by the prompt", "closed": "ruled out by the prompt"}
    stops = " ".join(dict.fromkeys([ends.call, ends.answer]))
    return [name, chat.verdict, calls, results, thinking[chat.checked.thinking], stops, chat.reason]


def _row(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |"


def write_table(page: Path) -> None:
    """Puts the table into the page, in the place of the one that stands there."""
    text = page.read_text()
    start, end = text.index("| template |"), text.rindex("|\n")
    page.write_text(text[:start] + table() + text[end + 1 :])


if __name__ == "__main__":
    write_table(DOCS)
