"""The learner: one DeepSpeed rank (`LearnerRank`), packing, log-probabilities, objectives, checkpoints, export, weight
source.

Importing this package is cheap; `learner.rank` imports DeepSpeed, everything else at most torch and transformers.
"""
