"""`python -m sandbox.image [--tag TAG] [--how auto|dockerfile|debootstrap] [--with PACKAGE]`: build the sandbox image."""

from __future__ import annotations

import argparse

from sandbox.image import build


def main() -> None:
    """Build and print the image id."""
    parser = argparse.ArgumentParser(prog="python -m sandbox.image", description="Build the sandbox image.")
    parser.add_argument("--tag", default="toolrl-sandbox:latest")
    parser.add_argument("--how", default="auto", choices=["auto", "dockerfile", "debootstrap"])
    told = "also install PACKAGE: matplotlib, pandas, scipy; may be repeated"
    parser.add_argument("--with", dest="extras", action="append", default=[], metavar="PACKAGE", help=told)
    arguments = parser.parse_args()
    print(build(arguments.tag, arguments.how, arguments.extras))


main()
