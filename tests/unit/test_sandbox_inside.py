"""What runs inside a box, as plain functions: frames, captured output, cells, files. No box is started."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandbox.inside import files
from sandbox.inside.capture import Capture
from sandbox.inside.cell import CellRunner, new_main_module
from sandbox.inside.frames import FrameDecoder, FrameError, encode


@given(st.lists(st.lists(st.binary(max_size=40), max_size=4), max_size=4), st.data())
def test_frames_come_out_as_they_went_in_however_the_stream_is_cut(messages, data):
    stream = b"".join(encode({"id": i}, *parts) for i, parts in enumerate(messages))
    decoder, frames = FrameDecoder(), []
    while stream:
        cut = data.draw(st.integers(1, len(stream)))
        frames += decoder.feed(stream[:cut])
        stream = stream[cut:]
    assert [(frame.header["id"], frame.parts) for frame in frames] == list(enumerate(messages))


@given(st.binary(max_size=300))
@settings(max_examples=100)
def test_any_bytes_are_frames_or_a_frame_error(noise):
    decoder = FrameDecoder(max_body_bytes=1000)
    try:
        for start in range(0, len(noise), 7):
            decoder.feed(noise[start : start + 7])
    except FrameError:
        pass


@pytest.mark.parametrize(
    "header",
    [b"[]", b"nonsense", b"{}", b'{"parts":3}', b'{"parts":[-1]}', b'{"parts":[true]}', b'{"parts":[9]}', b"[" * 5000],
)
def test_a_header_that_does_not_describe_the_body_is_refused(header):
    with pytest.raises(FrameError):
        FrameDecoder().feed(len(header).to_bytes(4, "big") + (0).to_bytes(4, "big") + header)


def test_a_length_over_the_cap_is_refused_before_the_body_arrives():
    with pytest.raises(FrameError):
        FrameDecoder(max_body_bytes=10).feed((2).to_bytes(4, "big") + (11).to_bytes(4, "big"))


@given(st.lists(st.binary(max_size=50)), st.integers(2, 60))
def test_capture_keeps_everything_below_its_cap_and_counts_what_is_above(chunks, cap):
    capture, whole = Capture(cap), b"".join(chunks)
    for chunk in chunks:
        capture.feed(chunk)
    head, tail = capture.parts()
    assert capture.total == len(whole)
    assert whole.startswith(head) and whole.endswith(tail) and len(head) + len(tail) <= max(cap, 2)
    if len(whole) <= cap // 2 * 2:
        assert head + tail == whole


@given(st.text(alphabet="aé€😀", min_size=30, max_size=80), st.integers(8, 40))
def test_a_cut_never_splits_a_character(text, cap):
    capture = Capture(cap)
    for byte in text.encode():
        capture.feed(bytes([byte]))
    head, tail = capture.parts()
    head.decode()
    tail.decode()


def run(*cells: str, limit: int = 10_000):
    runner = CellRunner(new_main_module().__dict__, limit)
    for cell in cells:
        outcome = runner.run(cell)
    return outcome


def test_the_last_expression_is_echoed_and_kept_as_underscore():
    assert run("x = 20\nx + 1").value == "21"
    assert run("5", "_ + 1").value == "6"
    assert run("5;").value == ""
    assert run("x = 5").value == ""
    assert run("None").value == ""


def test_the_traceback_holds_the_users_frames_only():
    error = run("def f():\n    return 1 / 0\nf()").error
    assert error.startswith('Traceback (most recent call last):\n  File "<cell 1>", line 3, in <module>\n    f()\n')
    assert "in f\n    return 1 / 0" in error and error.endswith("ZeroDivisionError: division by zero\n")
    assert "cell.py" not in error


@pytest.mark.parametrize("code", ["1 +", "x = 'abc", "\0", "  indent", "return 5", "é = \ud800"])
def test_source_that_is_no_python_is_an_error(code):
    assert run(code.encode("utf-8", "replace").decode()).error


def test_await_works_at_top_level_and_asyncio_run_too():
    assert run("import asyncio\nawait asyncio.sleep(0, 3)").value == "3"
    assert run("import asyncio\nasync def f(): return 4\nasyncio.run(f())").value == "4"


@pytest.mark.parametrize(
    ("code", "exit_code"),
    [
        ("import sys; sys.exit(5)", 5),
        ("raise SystemExit", 0),
        ("class E(SystemExit): pass\nraise E(7)", 7),
        ("raise SystemExit('bye')", 1),
        ("raise SystemExit(10**50)", 1),
        ("raise KeyboardInterrupt", None),
        ("raise GeneratorExit", None),
    ],
)
def test_exits_are_errors_and_carry_their_code(code, exit_code):
    outcome = run(code)
    assert outcome.error and outcome.exit_code == exit_code


def test_exceptions_whose_text_misbehaves_are_described_anyhow():
    assert "E" in run("class E(Exception):\n  def __str__(self): raise SystemExit\nraise E").error
    assert len(run("raise Exception('x' * 50_000_000)", limit=1000).error) < 1200
    assert "RecursionError" in run("def f(): f()\nf()").error


def test_a_long_value_is_cut_in_the_middle_with_a_note():
    value = run("'a' * 5000 + 'z'", limit=100).value
    assert len(value) < 200 and value.startswith("'aa") and value.endswith("az'") and "omitted" in value


@pytest.mark.parametrize(
    "name", ["", "/etc/passwd", "../x", "a/../../x", "a//b", ".", "a\0b", "x" * 300, "/".join("a" * 40)]
)
def test_names_outside_the_work_folder_are_refused(name, tmp_path):
    with pytest.raises(files.FileRefused):
        files.put(str(tmp_path), name, b"x")


def test_files_go_in_and_out_and_are_listed(tmp_path):
    work = str(tmp_path)
    files.put(work, "a/b.txt", b"hello")
    files.put(work, "a/b.txt", b"bye")
    files.put(work, "c.bin", b"")
    assert files.get(work, "a/b.txt", 100) == b"bye"
    assert files.listing(work) == [{"name": "a/b.txt", "size": 3}, {"name": "c.bin", "size": 0}]
    with pytest.raises(files.FileRefused):
        files.get(work, "a/b.txt", 2)


def test_links_fifos_and_folders_are_not_followed(tmp_path):
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("s")
    work = tmp_path / "work"
    work.mkdir()
    (work / "link").symlink_to(tmp_path / "outside" / "secret")
    (work / "folder").symlink_to(tmp_path / "outside")
    os.mkfifo(work / "fifo")
    for name in ("link", "folder/secret", "fifo"):
        with pytest.raises((files.FileRefused, OSError)):
            files.get(str(work), name, 100)
        with pytest.raises((files.FileRefused, OSError)):
            files.put(str(work), name, b"x")
    assert files.listing(str(work)) == []
    assert (tmp_path / "outside" / "secret").read_text() == "s"


def test_what_runs_inside_a_box_imports_nothing_heavy():
    code = "import sys, sandbox.process.main; print(sorted({'docker', 'requests', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.stdout.strip() == "[]", done.stderr
