"""Hostile cells, each with its right outcome, on the real backends. They run only inside a container or under bubblewrap.

After each: the next run works or state was said to be lost; the next episode on the box finds no process but the first and
its own, empty folders, and none of the old names.
"""

# ruff: noqa: E501  one case a line
from __future__ import annotations

import asyncio
import time

import pytest
import pytest_asyncio

from sandbox import SandboxConfig, SandboxPool
from tests.hostile.judging import ENOUGH_S, LIBC, TIMEOUT_S, Hostile, judge, refused
from tests.requirements import need

pytestmark = pytest.mark.asyncio(loop_scope="module")
GROW = "hold = []\nwhile True: hold.append(bytearray(2**22))"
FRAMES = """
import os, struct
frame = struct.Struct(">B16sBBiII").pack(1, os.urandom(16), 0, 0, 0, 6, 0) + b"forged"
for fd in range(3, 300):
    try: os.write(fd, frame)
    except OSError: pass
"""
FORGE = """
import gc, os, struct, sys
# The honest token of this run is in a frame of the interpreter: find it and answer in its name.
frame = sys._getframe()
while frame.f_back: frame = frame.f_back
frames = []
f = sys._getframe()
while f:
    if "token" in f.f_locals and "result" in f.f_locals:
        token, fd = f.f_locals["token"], f.f_locals["result"]
    f = f.f_back
os.write(fd, struct.Struct(">B16sBBiII").pack(1, token, 0, 0, 0, 6, 0) + b"forged")
"""

CASES = [
    # Too much of something.
    Hostile("fork bomb", "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("thread bomb", "import threading, time\nwhile True:\n    try: threading.Thread(target=time.sleep, args=(99,)).start()\n    except RuntimeError: pass", ("timeout", "error"), timeout_s=TIMEOUT_S),
    Hostile("memory in steps", GROW, ("oom", "error")),
    Hostile("one allocation of 3 GiB", "x = bytearray(3 * 2**30)\nx[::4096] = bytes(len(x[::4096]))", ("oom", "error")),
    Hostile("a gigabyte to stdout", "import sys\nfor _ in range(1000): sys.stdout.write('x' * 10**6)", ("output_limit",), "omitted"),
    Hostile("bytes to fd 2 for ever", "import os\nwhile True: os.write(2, b'y' * 65536)", ("output_limit",), "omitted"),
    Hostile("recursion without end", "def f(): return f()\nf()", ("error",), "RecursionError"),
    Hostile("recursion with the limit raised", "import sys\nsys.setrecursionlimit(10**9)\ndef f(): return f()\nf()", ("died", "error", "oom", "timeout"), timeout_s=1.5),
    Hostile("a number too long to print", "str(10**(10**7))", ("error", "timeout"), timeout_s=0.8),
    Hostile("exception text of 50 MB", "raise Exception('x' * 50_000_000)", ("error",), "omitted"),
    Hostile("one value of 50 MB", "'x' * 50_000_000", ("ok",), "omitted"),
    Hostile("a file that fills the folder", "open('big', 'wb').write(bytes(500 * 2**20))", ("error", "oom")),
    Hostile("files without number", "for i in range(40000): open(f'f{i}', 'w').close()", ("error",), "No space left", backends=("docker",)),
    Hostile("3,000 nested folders", "import os\nfor _ in range(3000):\n    os.mkdir('d'); os.chdir('d')", ("ok",)),
    Hostile("16 burners left behind", "import os\nfor _ in range(16):\n    if os.fork() == 0:\n        while True: pass", ("ok",)),
    Hostile("descriptors without number", "import os\nl = []\nwhile True: l.append(os.dup(0))", ("error",), "Too many open files"),
    # Not ending.
    Hostile("endless loop", "while True: pass", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("loop that ignores signals and swallows everything", "import signal\nfor s in (signal.SIGTERM, signal.SIGALRM, signal.SIGINT):\n    signal.signal(s, signal.SIG_IGN)\nwhile True:\n    try:\n        while True: pass\n    except BaseException: pass", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("sleeping with output before", "print('early', flush=True)\nimport time\ntime.sleep(99)", ("timeout",), "early", timeout_s=TIMEOUT_S),
    Hostile("timeout with much output", "for i in range(300): print('x' * 1000)\nwhile True: pass", ("timeout",), "omitted", timeout_s=TIMEOUT_S),
    Hostile("a repr that loops", "class R:\n    def __repr__(self):\n        while True: pass\nR()", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("an exception whose text loops", "class E(Exception):\n    def __str__(self):\n        while True: pass\nraise E", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("a regular expression that explodes", "import re\nre.match('(a+)+$', 'a' * 64 + 'b')", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("input", "input()", ("error",), "EOFError"),
    Hostile("stopping itself", "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)", ("timeout",), timeout_s=TIMEOUT_S),
    # Ending.
    Hostile("os._exit(3)", "import os\nos._exit(3)", ("died",), exit_code=3),
    Hostile("os.abort", "import os\nos.abort()", ("died",), "SIGABRT", exit_code=-6),
    Hostile("null read", "import ctypes\nctypes.string_at(0)", ("died",), "SIGSEGV", exit_code=-11),
    Hostile("kill -9 of itself", "import os\nos.kill(os.getpid(), 9)", ("died",), "SIGKILL", exit_code=-9),
    Hostile("kill of everything", "import os\nos.kill(-1, 9)\n7", ("died", "ok", "error")),
    Hostile("sys.exit(5)", "import sys\nsys.exit(5)", ("error",), "SystemExit", exit_code=5),
    Hostile("alarm", "import signal, time\nsignal.alarm(1)\ntime.sleep(5)", ("died",), "SIGALRM"),
    Hostile("exit in a thread", "import os, threading, time\nthreading.Thread(target=lambda: os._exit(9)).start()\ntime.sleep(5)", ("died",), exit_code=9),
    # Forging.
    Hostile("fake results on every descriptor", FRAMES, ("protocol_violation",)),
    Hostile("a valid forged result, then a normal return", FORGE, ("protocol_violation",), hides="forged"),
    Hostile("closing every descriptor", "import os\nos.closerange(0, 1024)", ("died", "protocol_violation", "timeout"), timeout_s=2.0),
    Hostile("builtins and modules replaced", "import builtins, json, struct, os, sys\nbuiltins.len = builtins.repr = builtins.isinstance = lambda *a: 0\njson.dumps = struct.pack = os.write = sys.exit = None\n40 + 2", ("ok",), "42"),
    Hostile("streams replaced", "import sys\nsys.stdout = sys.stderr = sys.stdin = None\n40 + 2", ("ok",), "42"),
    Hostile("running on in a forked child", "import os\nos.fork()\nprint('both')", ("ok",), "both"),
    Hostile("a child that holds stdout", "import subprocess\nsubprocess.Popen(['sleep', '99'])\nprint('back')", ("ok",), "back"),
    Hostile("a daemon that keeps writing", "import os, time\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        while True:\n            open('log', 'a').write('x' * 1000); time.sleep(0.001)\n    os._exit(0)\nprint('back')", ("ok",), "back"),
    Hostile("a thread that prints later", "import threading, time\ndef late():\n    while True: print('LATE'); time.sleep(0.01)\nthreading.Thread(target=late, daemon=True).start()", ("ok",)),
    # Reaching out.
    refused("reading the first process's environment", "open('/proc/1/environ').read()"),
    refused("reading the first process's memory", "open('/proc/1/mem', 'rb').read(1)"),
    refused("opening the first process's stream", "import os\nos.open('/proc/1/fd/1', os.O_WRONLY)"),
    refused("listing the first process's descriptors", "import os\nos.listdir('/proc/1/fd')"),
    refused("ptrace of the first process", LIBC + "check(libc.ptrace(16, 1, 0, 0))"),
    refused("mount", LIBC + "check(libc.mount(b'none', b'/tmp', b'tmpfs', 0, None))"),
    refused("a new user namespace", LIBC + "check(libc.unshare(0x10000000))"),
    refused("mknod", "import os, stat\nos.mknod('disk', stat.S_IFBLK | 0o600, os.makedev(8, 0))"),
    refused("setuid(0)", "import os\nos.setuid(0)"),
    refused("chroot", "import os\nos.chroot('.')"),
    refused("a raw socket", "import socket\nsocket.socket(socket.AF_INET, socket.SOCK_RAW, 1)"),
    refused("connecting outside", "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=5)"),
    refused("resolving a name", "import socket\nsocket.gethostbyname('example.com')"),
    refused("appending to /etc/passwd", "open('/etc/passwd', 'a').write('x')"),
    refused("writing beside the interpreter", "import os\nopen(os.path.dirname(os.__file__) + '/x.py', 'w')"),
    refused("writing a sysctl", "open('/proc/sys/kernel/hostname', 'w').write('x')"),
    refused("triggering sysrq", "open('/proc/sysrq-trigger', 'w').write('h')"),
    refused("changing the clock", "import time\ntime.clock_settime(time.CLOCK_REALTIME, 0)"),
    Hostile("signals to the first process", "import os, signal\nfor s in (1, 2, 3, 6, 9, 11, 15, 17, 19): os.kill(1, s)\n'alive'", ("ok",), "alive"),
    Hostile("links to the outside", "import os\nfor i, t in enumerate(('/etc', '/', '/etc/passwd', '..', 'nowhere')): os.symlink(t, f'l{i}')", ("ok",)),
    Hostile("folders without permissions", "import os\nos.makedirs('a/b/c')\nfor p in ('a/b/c', 'a/b', 'a', '.'): os.chmod(p, 0)", ("ok",)),
    Hostile("extended attributes and odd names", "import os\nopen(b'\\xff\\n', 'w').close()\nos.mkfifo('fifo')\ntry: os.setxattr('.', 'user.secret', b'x')\nexcept OSError: pass", ("ok",)),
    Hostile("pip install", "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', 'install', '--retries', '0', 'left-pad']).returncode", ("ok",), hides="Successfully"),
    Hostile("bytes that are no text", "import os\nos.write(1, b'a\\xff\\x00\\x1b[31m\\xe2\\x82\\xac')", ("ok",), "a\\xff\x00\x1b[31m€"),
    Hostile("multiprocessing", "from multiprocessing import Pool\ndef f(x): return x * x\nwith Pool(4) as p: r = p.map(f, range(4))\nr", ("ok",), "[0, 1, 4, 9]"),
    # What would outlive the episode: such boxes are replaced.
    Hostile("a file in /dev/shm", "open('/dev/shm/secret', 'w').write('s')", ("ok",)),
    Hostile("shared memory of System V", LIBC + "check(libc.shmget(0x1234, 4096, 0o1600))", ("ok",)),
    Hostile("a message queue", LIBC + "libc.mq_open(b'/secret', os.O_CREAT, 0o600, None)", ("ok",)),
    Hostile("limits of the first process", "import resource\nfor n in ('NPROC', 'NOFILE', 'FSIZE'):\n    r = getattr(resource, 'RLIMIT_' + n)\n    try: resource.prlimit(1, r, (100, 100))\n    except (ValueError, OSError): pass", ("ok",)),
    Hostile("priority and affinity of the first process", "import os\nos.setpriority(os.PRIO_PROCESS, 1, 19)\nos.sched_setaffinity(1, {min(os.sched_getaffinity(0))})", ("ok",)),
    Hostile("secrets in every place", "import os, math\nmath.secret = 's'\nos.environ['SECRET'] = 's'\nfor d in ('.', '/tmp'): open(d + '/secret', 'w').write('s')", ("ok",)),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["docker", "process"])
async def pool(request):
    """One box, so that each episode gets the one that the last has left."""
    need("docker" if request.param == "docker" else "bubblewrap")
    config = SandboxConfig(
        backend=request.param, confinement="bubblewrap", min_sessions=1, max_sessions=1, run="hostile"
    )
    async with SandboxPool(config) as pool:
        yield pool


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_hostile_cell(pool, case):
    await judge(pool, case)


async def test_many_small_hogs_that_lower_their_score_are_told_as_oom(pool):
    if pool.stats().backend != "docker":
        pytest.skip("only a container has a memory limit of its own")
    code = (
        "import os\nfor _ in range(50):\n    if os.fork() == 0:\n"
        "        open('/proc/self/oom_score_adj', 'w').write('0')\n        hold = []\n"
        "        while True: hold.append(bytearray(2**18))\nimport time\ntime.sleep(99)"
    )
    async with await pool.acquire(episode_id="hogs") as session:
        result = await session.run(code, timeout_s=60)
        assert result.status == "oom" and result.state_lost, result
        assert (await session.run("1 + 1", timeout_s=ENOUGH_S)).value == "2"


async def test_a_reset_after_a_fork_bomb_is_quick(pool):
    session = await pool.acquire(episode_id="bomb")
    await session.run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", timeout_s=0.3)
    await session.release()
    start = time.monotonic()
    await (await pool.acquire(episode_id="next")).release()
    assert time.monotonic() - start < 5.0


async def test_burners_stay_within_the_quota_of_the_box(pool):
    if pool.stats().backend != "docker":
        pytest.skip("only a container has a quota")
    code = (
        "import os, time, glob\nfor _ in range(16):\n    if os.fork() == 0:\n        while True: pass\n"
        "def used():\n    for p in ('/sys/fs/cgroup/cpuacct/cpuacct.usage', '/sys/fs/cgroup/cpu,cpuacct/cpuacct.usage'):\n"
        "        if os.path.exists(p): return int(open(p).read()) / 1e9\n"
        "    return int(open('/sys/fs/cgroup/cpu.stat').read().split()[1]) / 1e6\n"
        "a, t = used(), time.monotonic()\ntime.sleep(1)\n(used() - a) / (time.monotonic() - t)"
    )
    async with await pool.acquire(episode_id="burners") as session:
        result = await session.run(code, timeout_s=ENOUGH_S)
        assert result.status == "ok" and float(result.value) < 1.3, result


async def test_twenty_episodes_on_one_box_share_no_name(pool):
    for number in range(20):
        async with await pool.acquire(episode_id=f"e{number}") as session:
            assert "NameError" in (await session.run("shared", timeout_s=ENOUGH_S)).stderr
            assert (await session.run(f"shared = {number}\nshared", timeout_s=ENOUGH_S)).value == str(number)


async def test_a_cancelled_run_leaves_nothing_to_the_next(pool):
    session = await pool.acquire(episode_id="cancelled")
    await session.run("x = 1")
    running = asyncio.create_task(session.run("import time\ntime.sleep(30)\n'late'", timeout_s=40))
    await asyncio.sleep(0.2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    after = await session.run("'x' in globals()", timeout_s=ENOUGH_S)
    assert after.value == "False" and after.state_lost and "gone" in after.note, after
    assert not (await session.run("1", timeout_s=ENOUGH_S)).state_lost
    await session.release()
    async with await pool.acquire(episode_id="next") as session:
        assert (await session.run("2", timeout_s=ENOUGH_S)).value == "2"
