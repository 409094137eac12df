"""What this process and its children printed lately, where that goes into files, as Ray has it: for errors that else only say
that a child failed."""

from __future__ import annotations

import os
import re
import stat

TAIL_BYTES = 256 * 1024
LINES, LETTERS = 3, 300
# As Python ends a traceback or shows an error, whatever a logger put in front of it.
_ERROR = re.compile(r"""(?:^|\s)((?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception)(?:: |\(['"]).*)""")


def last_errors() -> list[str]:
    """The errors that were printed last, oldest first; none where the output is no file."""
    text = ""
    for descriptor in (1, 2):
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            with open(f"/proc/self/fd/{descriptor}", "rb") as file:
                file.seek(max(0, os.fstat(descriptor).st_size - TAIL_BYTES))
                text += file.read().decode(errors="replace") + "\n"
    return error_lines(text)


def error_lines(text: str) -> list[str]:
    """The last lines of a text that name an error, each once."""
    found = dict.fromkeys(match[1].strip()[:LETTERS] for match in map(_ERROR.search, text.splitlines()) if match)
    return list(found)[-LINES:]
