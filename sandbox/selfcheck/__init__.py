"""Checks every promise of docs/sandbox.md on this machine: `run_checks(config)` gives one finding a promise."""

from sandbox.selfcheck.checks import Finding, run_checks

__all__ = ["Finding", "run_checks"]
