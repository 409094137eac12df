"""Ray for a run: a cluster that is there, or a local one that ends with this process. Either is up soon, or says why not."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import ray

from toolrl import placement
from toolrl.app.ending import keeping_our_handler
from toolrl.config import RunConfig
from toolrl.errors import RunError, UserError

log = logging.getLogger(__name__)

COMMON: dict[str, Any] = {"namespace": "toolrl", "log_to_driver": False, "logging_level": "error"}
ANSWERS_WITHIN_S = 5.0
TRIES = 3  # Ray gives a node of its own 30 s to start, which a busy machine may miss


def start_ray(config: RunConfig) -> None:
    """Joins the cluster at `placement.ray_address`, or starts a local one that ends with this process.

    Raises:
        UserError: nothing answers at that address.
        RunError: the local cluster did not start.
    """
    if config.placement.ray_address:
        _join(config.placement.ray_address)
    else:
        _start(config)


def _join(address: str) -> None:
    key = f"placement.ray_address={address}"
    if address != "auto":  # Ray itself would try for minutes
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), ANSWERS_WITHIN_S).close()
        except OSError as error:
            raise UserError(
                f"{key}: no Ray cluster answers there ({error}); start one with `ray start --head`, correct the address "
                "(that of `ray status`, by default port 6379), or leave it empty for a local one"
            ) from error
    try:
        with keeping_our_handler():
            ray.init(address=address, **COMMON)
    except ConnectionError as error:
        raise UserError(
            f"{key}: {error} A cluster is started with `ray start --head`; without an address there is a local one"
        ) from error


def _start(config: RunConfig) -> None:
    cores = os.cpu_count() or 1
    # A laptop may have fewer cores than parts: Ray's CPU is a place in its queue, the kernel shares the real ones. There
    # are places for twice the rollout workers, so that `toolrl scale` can add some.
    doubled = replace(config, rollout=replace(config.rollout, workers=2 * config.rollout.workers))
    wanted = placement.needed(doubled, placement.resolve_device(config, {"CPU": cores})).total()
    for again in range(TRIES, 0, -1):
        try:
            with _leaving_nothing(), keeping_our_handler():
                ray.init(
                    address="local",
                    num_cpus=max(cores, math.ceil(wanted["CPU"])),
                    resources={"sandbox": wanted["sandbox"]} if wanted["sandbox"] else None,
                    include_dashboard=False,
                    **COMMON,
                )
            return
        except Exception as error:  # Ray raises nothing narrower
            if again == 1:
                raise RunError(
                    f"Ray did not start on this machine in {TRIES} tries: {error} "
                    f"Load average: {os.getloadavg()[0]:.0f}; what its processes said is under /tmp/ray/session_latest/logs"
                ) from error
            log.warning("Ray did not start, another try follows: %s", error)


@contextlib.contextmanager
def _leaving_nothing() -> Iterator[None]:
    """Ends what was started inside, if that fails: Ray leaves a node's processes there until this one ends."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    try:
        yield
    except BaseException:
        ray.shutdown()
        started = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
        for child in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(started, timeout=5)
        raise
