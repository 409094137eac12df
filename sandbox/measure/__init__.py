"""How fast the sandbox is on this machine, beside its limit and its peers: `measure(config)` gives rows of one table."""

from sandbox.measure.figures import Figure
from sandbox.measure.loops import on_the_loop_of_actors
from sandbox.measure.report import measure

__all__ = ["Figure", "measure", "on_the_loop_of_actors"]
