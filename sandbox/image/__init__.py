"""The image that containers of the Docker backend are made from: the warden, its guard, and how to build it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

How = Literal["auto", "dockerfile", "debootstrap"]


def build(tag: str = "toolrl-sandbox:latest", how: How = "auto", extras: Sequence[str] = ()) -> str:
    """Build the image under `tag` and return its id; see `sandbox.image.builder.build_image`."""
    from sandbox.image.builder import build_image

    return build_image(tag, how, extras)
