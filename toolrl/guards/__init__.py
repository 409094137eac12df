"""Guards: rules over a run's metrics, and what they do when a rule holds. See docs/collapse.md. Imports no torch."""

from toolrl.guards.guards import Guards
from toolrl.guards.journal import Journal
from toolrl.guards.rule import Decision, Rule

__all__ = ["Decision", "Guards", "Journal", "Rule"]
