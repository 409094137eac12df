"""The host's side without a box: settings, results, owners, the channel's bookkeeping."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys

import pytest

import sandbox
from sandbox import SandboxConfig
from sandbox.breaker import Breaker
from sandbox.channel import Channel, ChannelClosed
from sandbox.inside.frames import FrameDecoder, encode
from sandbox.owner import is_gone, owner_name
from sandbox.result import from_frame


@pytest.mark.parametrize(
    "wrong",
    [
        {"backend": "vm"},
        {"min_sessions": 5, "max_sessions": 2},
        {"max_sessions": 0, "min_sessions": 0},
        {"timeout_s": 0},
        {"memory_mib": 0},
        {"max_output_bytes": 100, "output_limit_bytes": 10},
        {"confinement": "chroot"},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong):
    with pytest.raises(ValueError):
        SandboxConfig(**wrong)


def test_the_public_names_are_there():
    for name in sandbox.__all__:
        assert getattr(sandbox, name) is not None
    with pytest.raises(AttributeError):
        sandbox.nothing  # noqa: B018


def header(**more):
    return {
        "status": "ok",
        "exit_code": None,
        "wall_s": 0.1,
        "cpu_s": 0.1,
        "state_lost": False,
        "stdout_bytes": 0,
        "stderr_bytes": 0,
        "note": "",
        **more,
    }


def test_bytes_that_are_no_text_become_text_and_nothing_is_dropped():
    raw = b"a\xff\x00\x1b[31mb\xed\xa0\x80"
    result = from_frame(header(stdout_bytes=len(raw)), [raw, b"", b"", b"", b"", b""], 1.0, 0.0)
    assert result.stdout == "a\\xff\x00\x1b[31mb\\xed\\xa0\\x80"
    result.stdout.encode()


def test_left_out_output_is_told_with_its_byte_count():
    result = from_frame(header(stdout_bytes=1000), [b"head", b"tail", b"", b"", b"", b""], 1.0, 0.0)
    assert result.truncated and result.stdout == "head\n[... 992 of 1000 bytes omitted ...]\ntail"


def test_the_traceback_comes_after_what_was_printed():
    result = from_frame(header(status="error", stderr_bytes=3), [b"", b"", b"err", b"", b"", b"Trace"], 1.0, 0.0)
    assert result.stderr == "err\nTrace"


def test_lost_state_and_signals_are_told():
    result = from_frame(header(status="died", exit_code=-11, state_lost=True), [b""] * 6, 1.0, 0.0)
    assert "SIGSEGV" in result.note and "variables are gone" in result.note


@pytest.mark.parametrize(
    "wrong", [{"status": "fine"}, {"exit_code": "3"}, {"exit_code": True}, {"wall_s": None}, {"stdout_bytes": "x"}]
)
def test_a_malformed_result_raises(wrong):
    with pytest.raises((KeyError, TypeError, ValueError)):
        from_frame(header(**wrong), [b""] * 6, 1.0, 0.0)


def test_this_process_lives_and_a_dead_one_is_gone():
    assert not is_gone(owner_name())
    code = "from sandbox.owner import owner_name; print(owner_name())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30).stdout.strip()
    assert other and is_gone(other)
    reused = owner_name().split("/")
    reused[3] = "1"  # our pid, another start
    assert is_gone("/".join(reused))


@pytest.mark.parametrize("owner", ["", "nonsense", "boot/1/2", "other-machine/4026531836/1/5/abcd"])
def test_an_owner_that_cannot_be_judged_is_left_alone(owner):
    assert not is_gone(owner)


async def connected() -> tuple[Channel, socket.socket]:
    ours, theirs = socket.socketpair()
    _, channel = await asyncio.get_running_loop().create_connection(Channel, sock=ours)
    theirs.setblocking(False)
    return channel, theirs


async def receive(peer: socket.socket, decoder: FrameDecoder):
    frames = []
    while not frames:
        frames = decoder.feed(await asyncio.get_running_loop().sock_recv(peer, 65536))
    return frames


async def test_answers_are_matched_by_id_and_late_ones_are_discarded():
    channel, peer = await connected()
    decoder = FrameDecoder()
    with pytest.raises(TimeoutError):
        await channel.request({"op": "a"}, deadline_s=0.02)
    ((first, _),) = await receive(peer, decoder)
    asking = asyncio.create_task(channel.request({"op": "b"}, deadline_s=5))
    ((second, _),) = await receive(peer, decoder)
    peer.send(encode({"id": first["id"], "late": True}) + encode({"id": second["id"], "late": False}, b"x"))
    frame = await asking
    assert frame.header["late"] is False and frame.parts == [b"x"]
    channel.close()
    peer.close()


async def test_a_cancelled_request_tells_the_box():
    channel, peer = await connected()
    decoder = FrameDecoder()
    asking = asyncio.create_task(channel.request({"op": "run"}, deadline_s=5))
    ((request, _),) = await receive(peer, decoder)
    asking.cancel()
    ((cancel, _),) = await receive(peer, decoder)
    assert cancel["op"] == "cancel" and cancel["id"] == request["id"]
    channel.close()
    peer.close()


@pytest.mark.parametrize("ending", ["close", "noise"])
async def test_the_end_of_the_stream_and_noise_fail_what_waits(ending):
    channel, peer = await connected()
    asking = asyncio.create_task(channel.request({"op": "run"}, deadline_s=5))
    await asyncio.sleep(0.01)
    if ending == "noise":
        peer.send(os.urandom(4) + b"\xff" * 60)
    else:
        peer.close()
    with pytest.raises(ChannelClosed):
        await asking
    assert not channel.open
    with pytest.raises(ChannelClosed):
        channel.send({"op": "ping"})
    peer.close()


def test_the_breaker_waits_longer_each_time_and_opens_at_its_threshold():
    breaker = Breaker(threshold=3, cooldown_s=60.0)
    first, second = breaker.failed("a"), breaker.failed("b")
    assert 0 < first < second < 60 and not breaker.open
    assert breaker.failed("c") == 60 and breaker.open and breaker.last_failure == "c"
    breaker.succeeded()
    assert not breaker.open and breaker.failed("d") == first
