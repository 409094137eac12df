"""Corrections for the gap between engine and trainer, and for staleness, one a file. Detached weights for the token loss,
[B, T] or [B]; never renormalised by the tokens kept."""

from toolrl.algorithms.corrections.decoupled import decoupled
from toolrl.algorithms.corrections.icepop import icepop
from toolrl.algorithms.corrections.mis import mis
from toolrl.algorithms.corrections.tis import tis

__all__ = ["decoupled", "icepop", "mis", "tis"]
