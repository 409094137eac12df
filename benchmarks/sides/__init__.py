"""The sides that benchmarks/learner.py and benchmarks/trl.py put beside each other, each a process of its own.

Those of TRL run in its own environment, so whatever they import from here imports no toolrl.
"""
