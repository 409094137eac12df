"""The codec gives back what it was given, stays small, and never takes damage for data."""

from __future__ import annotations

import json
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trajectory_strategies import json_values, trajectories
from toolrl.trajectory import Outcome, ToolCall, Trajectory, Turn
from toolrl.trajectory_codec import CorruptTrajectory, decode, encode


def trajectory(logprobs: list[float], **fields: object) -> Trajectory:
    n = len(logprobs)
    turn = Turn("policy", list(range(40_000, 40_000 + n)), logprobs, [7] * n, "stop", "text")
    return Trajectory("id", "g000001", "task", 3, list(range(50)), [turn], Outcome.ANSWERED, **fields)  # type: ignore[arg-type]


@settings(max_examples=60)
@given(trajectories())
def test_any_trajectory_survives_the_round_trip(original: Trajectory) -> None:
    assert decode(encode(original)) == original


nasty_text = st.text(max_size=6) | st.sampled_from(["\ud800", "a\udfffb"])


@settings(max_examples=60)
@given(trajectories(json_values(nasty_text, st.integers())))
def test_huge_integers_and_lone_surrogates_survive(original: Trajectory) -> None:
    assert decode(encode(original)) == original


def test_what_a_model_writes_as_json_survives() -> None:
    arguments = json.loads('{"n": 1000000000000000000000000000000, "s": "\\ud83d", "\\ud800": [true, null, -1e400]}')
    original = trajectory([-1.0])
    original.turns[0].calls = [ToolCall("1", "python", arguments)]
    assert decode(encode(original)).turns[0].calls[0].arguments == arguments


def test_log_probabilities_of_an_engine_cost_four_bytes() -> None:
    values = np.log(np.random.default_rng(0).random(1000)).astype(np.float32).astype(float).tolist()
    assert decode(encode(trajectory(values))).turns[0].logprobs == values
    assert len(encode(trajectory(values))) < 1000 * (4 + 2) + 400


@pytest.mark.parametrize("value", [-0.1, 1e-300, 1e300, -1.0000000001])
def test_one_value_that_float32_would_change_keeps_all_exact(value: float) -> None:
    values = [-0.5, value, -0.0]
    restored = decode(encode(trajectory(values))).turns[0].logprobs
    assert np.array(restored).tobytes() == np.array(values).tobytes()


def test_infinite_and_not_a_number_survive_for_the_post_mortem() -> None:
    values = [float("-inf"), float("nan"), -0.5]
    restored = decode(encode(trajectory(values))).turns[0].logprobs
    assert np.array_equal(restored, values, equal_nan=True)


@given(position=st.integers(min_value=0), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(position: int, bit: int) -> None:
    data = bytearray(encode(trajectory([-0.25, -0.5])))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CorruptTrajectory):
        decode(bytes(data))


@given(st.integers(min_value=0))
def test_bytes_that_are_cut_short_are_refused(length: int) -> None:
    data = encode(trajectory([-0.25]))
    with pytest.raises(CorruptTrajectory):
        decode(data[: length % len(data)])


@given(st.binary(max_size=64))
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(CorruptTrajectory, match="not an encoded trajectory"):
        decode(data)


def test_another_version_is_named() -> None:
    data = bytearray(encode(trajectory([-0.25])))
    data[3] = 9
    with pytest.raises(CorruptTrajectory, match=r"format 9 .* reads format 1"):
        decode(bytes(data))


def test_a_sound_checksum_over_another_shape_is_refused() -> None:
    body = msgspec.msgpack.encode({"not": "a trajectory"})
    with pytest.raises(CorruptTrajectory, match="body is not a trajectory"):
        decode(b"TRJ\x01" + zlib.crc32(body).to_bytes(4, "little") + body)


def test_metadata_that_json_cannot_hold_is_refused_with_the_trajectorys_name() -> None:
    with pytest.raises(TypeError, match=r"trajectory id: .*only what JSON can"):
        encode(trajectory([-0.25], metadata={"worker": object()}))
