"""Deterministic local embeddings of code, for GTPO's similarity: no model, no download, the same on every machine."""

from __future__ import annotations

import re
import zlib

import numpy as np

from toolrl.algorithms.registries import embedder_registry

DIMENSIONS = 256
_TOKEN = re.compile(r"\w+|[^\w\s]")


@embedder_registry.register("hashed_ngrams")
def hashed_ngrams(text: str) -> list[float]:
    """[256] signed hashed counts of the 1-, 2- and 3-grams of the text's words and signs, at length 1 (all 0 for empty
    text)."""
    tokens = _TOKEN.findall(text)
    vector = np.zeros(DIMENSIONS)
    for size in (1, 2, 3):
        for start in range(len(tokens) - size + 1):
            code = zlib.crc32("\x1f".join(tokens[start : start + size]).encode("utf-8", "replace"))
            vector[code % DIMENSIONS] += 1.0 if code >> 31 else -1.0
    length = float(np.linalg.norm(vector))
    scaled: list[float] = (vector / length if length else vector).tolist()
    return scaled
