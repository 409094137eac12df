"""`python -m sandbox.image [--tag TAG] [--how auto|dockerfile|debootstrap]`: build the sandbox image."""

from __future__ import annotations

import argparse

from sandbox.image import build


def main() -> None:
    """Build and print the image id."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.image", description="Build the sandbox image.")
    parser.add_argument("--tag", default="toolrl-sandbox:latest")
    parser.add_argument("--how", default="auto", choices=["auto", "dockerfile", "debootstrap"])
    arguments = parser.parse_args()
    print(build(arguments.tag, arguments.how))


main()
