"""Reinforcement learning for language models that use tools.

Importing `toolrl` is cheap: no torch, no Ray, no vLLM. The parts:
`toolrl.trajectory` (the data), `toolrl.config` (the settings), `toolrl.algorithms` (the mathematics), `toolrl.app` (the loop and
the command line), and beside this package `actors` (Ray), `learner` (DeepSpeed) and `sandbox` (the code interpreter).
"""

__version__ = "0.1.0"
