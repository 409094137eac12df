"""Corrections for the gap between engine and trainer, one a file: `tis`. Weights for the token loss; never
renormalised."""

from toolrl.algorithms.corrections.tis import tis

__all__ = ["tis"]
