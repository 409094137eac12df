"""Weights from the learner to the engines: versioned, checksummed, with deadlines. `docs/weights.md` tells the whole
way.

Learner: `Publisher().publish(source, version)`. Driver: `WeightChannel`. Worker: `WeightReceiver(engine).apply(publication)`.
"""

from actors.weights.arrivals import PublicationLost
from actors.weights.channel import Delivery, WeightChannel, WeightsBehind
from actors.weights.publication import Publication, TensorRecord
from actors.weights.publisher import Publisher
from actors.weights.receiver import WeightReceiver

__all__ = [
    "Delivery",
    "Publication",
    "PublicationLost",
    "Publisher",
    "TensorRecord",
    "WeightChannel",
    "WeightReceiver",
    "WeightsBehind",
]
