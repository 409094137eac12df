"""What a run will do on machines that nobody has rented yet: a discrete-event simulation from a few rates.

`Rates` says how fast the parts are (given, measured by an earlier run, or estimated from a GPU's data sheet),
`simulate` plays the loop with them, `Forecast` is what came of it, `best_split` looks for a better division of the GPUs.
"""

from toolrl.planning.forecast import Forecast
from toolrl.planning.layout import Layout
from toolrl.planning.rates import Rates
from toolrl.planning.simulation import simulate
from toolrl.planning.split import best_split

__all__ = ["Forecast", "Layout", "Rates", "best_split", "simulate"]
