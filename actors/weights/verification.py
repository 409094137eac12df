"""What is found out about a publication before anything is touched: that every tensor is expected, and that every byte is what
the learner sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from actors.engine_errors import REFUSED
from actors.weights.publication import TensorRecord, checksum_of


class Refused(ValueError):
    """Travels to the worker's process as text; see `actors.engine_errors.WeightsRefused`."""

    def __init__(self, why: str) -> None:
        super().__init__(f"{REFUSED}: {why}")


def expected_shapes(model_dir: str) -> dict[str, tuple[int, ...]] | None:
    """{name: shape} of the checkpoint that the engine started from; None where that is no safetensors folder."""
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for file in sorted(Path(model_dir).glob("*.safetensors")):
        with safe_open(file, framework="pt") as content:
            shapes.update({name: tuple(content.get_slice(name).get_shape()) for name in content.keys()})  # noqa: SIM118
    return shapes or None


def check_names(records: list[TensorRecord], expected: Mapping[str, tuple[int, ...]] | None, *, tied: bool) -> None:
    """Refuses a publication that is not exactly the model: what is missing would silently stay old."""
    if expected is None:
        return
    optional = {"lm_head.weight"} if tied else set()
    given = {record.name: record.shape for record in records}
    for what, names in (
        ("lacks", expected.keys() - given.keys() - optional),
        ("has unknown", given.keys() - expected.keys() - optional),
    ):
        if names:
            some = ", ".join(sorted(names)[:5])
            raise Refused(f"the publication {what} {len(names)} tensors of the model folder's: {some}")
    for name in given.keys() & expected.keys():
        if given[name] != tuple(expected[name]):
            raise Refused(f"{name} has shape {list(given[name])}, the model's is {list(expected[name])}")


def tensors(records: list[TensorRecord], buckets: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors as views into the buckets, in order."""
    for record in records:
        content = buckets[record.bucket][record.offset : record.offset + record.nbytes]
        yield record.name, content.view(getattr(torch, record.dtype)).view(record.shape)


def verified_tensors(records: list[TensorRecord], buckets: list[torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """`tensors`, each after its bytes were found to be those that the learner sent; without a checksum, as they are.

    Raises:
        Refused: they are not.
    """
    for record, (name, tensor) in zip(records, tensors(records, buckets), strict=True):
        if record.checksum:
            content = buckets[record.bucket][record.offset : record.offset + record.nbytes].numpy()
            received = checksum_of(record.name, record.dtype, record.shape, content)
            if received != record.checksum:
                raise Refused(f"checksum of {record.name} is {received}, the learner's is {record.checksum}")
        yield name, tensor
