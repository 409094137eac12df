"""What people see of a run: the live screen, log lines, curves, the last screen, stored trajectories."""

from toolrl.app.viewer.curves import plot_curves
from toolrl.app.viewer.summary import summary
from toolrl.app.viewer.view import View

__all__ = ["View", "plot_curves", "summary"]
