"""Tool calls in text: `toolcalls.get(name)` gives a parser, see `toolrl.toolcalls.parser` for what it keeps."""

from toolrl.toolcalls import fenced, hermes, tagged
from toolrl.toolcalls.parser import FormatState, Parsed, Parser, call_id, get, parsers

__all__ = ["FormatState", "Parsed", "Parser", "call_id", "fenced", "get", "hermes", "parsers", "tagged"]
