"""Regularisers, one a file: `kl`, `entropy`, `llds`, `sft`."""

from toolrl.algorithms.regularizers.entropy import entropy
from toolrl.algorithms.regularizers.kl import kl
from toolrl.algorithms.regularizers.llds import llds
from toolrl.algorithms.regularizers.sft import sft
from toolrl.algorithms.regularizers.terms import LossInputs, Term

__all__ = ["LossInputs", "Term", "entropy", "kl", "llds", "sft"]
