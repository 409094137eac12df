"""Whole parameters, whatever ZeRO stage holds them. Under ZeRO-3 everything here is collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch


def partitioned(parameter: torch.Tensor) -> bool:
    """Whether ZeRO-3 splits it over the ranks."""
    return hasattr(parameter, "ds_id")


def whole_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


@contextlib.contextmanager
def whole(parameters: Sequence[torch.nn.Parameter]) -> Iterator[None]:
    """Inside, these parameters are whole on every rank, to be read."""
    split = [parameter for parameter in parameters if partitioned(parameter)]
    if not split:
        yield
        return
    import deepspeed

    with deepspeed.zero.GatheredParameters(split):
        yield


@contextlib.contextmanager
def writable(parameter: torch.nn.Parameter) -> Iterator[bool]:
    """Inside, the parameter is whole and may be written where the block's value is true; every rank then has what was
    written. A partitioned one is written by rank 0 alone."""
    with torch.no_grad():
        if not partitioned(parameter):
            yield True
            return
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            yield torch.distributed.get_rank() == 0
