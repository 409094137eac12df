"""Conversations as token ids: `ChatFormat` and what it is made of. See docs/conversation.md."""

from toolrl.conversation.chat_format import ChatFormat, ObservationTooLong
from toolrl.conversation.encoding import Encoder
from toolrl.conversation.template import Message, TemplateRefused, ToolSchema
from toolrl.conversation.text import clean_text, neutralize
from toolrl.conversation.truncation import Cut, truncate_tokens

__all__ = [
    "ChatFormat",
    "Cut",
    "Encoder",
    "Message",
    "ObservationTooLong",
    "TemplateRefused",
    "ToolSchema",
    "clean_text",
    "neutralize",
    "truncate_tokens",
]
