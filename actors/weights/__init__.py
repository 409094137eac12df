"""Weights from the learner to the engines: versioned, checksummed, with deadlines. `docs/weights.md` tells the whole
way.

Learner: `publish(source, version)`. Driver: `WeightChannel`. Worker: `WeightReceiver(engine).apply(publication)`.
"""

from actors.weights.channel import Delivery, WeightChannel, WeightsBehind
from actors.weights.publication import Publication, TensorRecord, publish
from actors.weights.receiver import PublicationLost, WeightReceiver

__all__ = [
    "Delivery",
    "Publication",
    "PublicationLost",
    "TensorRecord",
    "WeightChannel",
    "WeightReceiver",
    "WeightsBehind",
    "publish",
]
