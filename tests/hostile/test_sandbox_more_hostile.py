"""More hostile cells, of kinds that no list has named: hooks left in the interpreter, descriptors turned around, bombs that
unpack, calls into the kernel, and ways from one episode or box to another. Judged as in `judging`."""

# ruff: noqa: E501  one case a line
from __future__ import annotations

import asyncio
import os
import time

import pytest
import pytest_asyncio

from sandbox import SandboxConfig, SandboxPool
from sandbox.inside.seccomp import _BY_ARCHITECTURE, _COMMON, _MACHINES
from tests.hostile.judging import ENOUGH_S, LIBC, TIMEOUT_S, Hostile, judge, refused
from tests.requirements import need

pytestmark = pytest.mark.asyncio(loop_scope="module")
COLUMN = _MACHINES[os.uname().machine][1]


def syscall(name: str, *arguments: str) -> str:
    """Code that makes a system call by its number and raises where it fails."""
    number = _COMMON.get(name) or _BY_ARCHITECTURE[name][COLUMN]
    return LIBC + f"check(libc.syscall({', '.join([str(number), *arguments])}))"


CASES = [
    # Hooks left in the interpreter, which our own code runs into.
    Hostile("a trace function that raises", "import sys\nsys.settrace(lambda *a: 1 / 0)", ("ok", "error", "died")),
    Hostile("a profile function that swallows the result", "import sys, os\nsys.setprofile(lambda f, e, a: os._exit(4) if e == 'return' else None)", ("died",), exit_code=4),
    Hostile("a trace function in every thread", "import threading, sys\nthreading.settrace(lambda *a: None)\nthreading.setprofile(lambda *a: None)\n1", ("ok",)),
    Hostile("a timer that raises in our loop", "import signal\ndef bang(*a): raise ValueError('late')\nsignal.signal(signal.SIGALRM, bang)\nsignal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)", ("ok", "died", "error"), spoils=True),
    Hostile("interrupts between cells", "import os, signal, threading, time\ndef late():\n    time.sleep(0.02)\n    os.kill(os.getpid(), signal.SIGINT)\nthreading.Thread(target=late, daemon=True).start()", ("ok",)),
    Hostile("atexit that never ends", "import atexit\n@atexit.register\ndef never():\n    while True: pass", ("ok",)),
    Hostile("a finalizer that revives itself", "import gc\nclass Z:\n    def __del__(self):\n        global z\n        z = Z()\nz = Z()\ndel z\ngc.collect()", ("ok",)),
    Hostile("finalizers that raise without end", "import gc\nclass D:\n    def __del__(self): raise SystemExit(9)\nfor _ in range(2000): D()\nprint('on')", ("ok", "output_limit"), "on"),
    Hostile("callbacks of the collector", "import gc\ngc.set_threshold(1)\ngc.callbacks.append(lambda *a: 1 / 0)\nx = [[] for _ in range(300)]\nlen(x)", ("ok",), "300"),
    Hostile("an import hook that refuses everything", "import sys\nclass No:\n    def find_spec(self, *a): raise ImportError('no')\nsys.meta_path[:] = [No()]\nsys.path_hooks.clear()\n40 + 2", ("ok",), "42"),
    Hostile("sys.modules poisoned", "import sys\nfor name in list(sys.modules): sys.modules[name] = None\n40 + 2", ("ok", "error", "died")),
    Hostile("our own modules rewritten", "import sys\nfor name, m in list(sys.modules.items()):\n    if name.startswith('sandbox'):\n        for k in list(vars(m)):\n            if not k.startswith('__'): setattr(m, k, None)", ("died", "ok", "error", "timeout"), timeout_s=TIMEOUT_S),
    Hostile("builtins emptied", "import builtins\nvars(builtins).clear()", ("ok", "died", "error")),
    Hostile("print and open replaced", "import builtins\nbuiltins.print = builtins.open = builtins.__import__ = None", ("ok",)),
    Hostile("audit hook that raises", "import sys\nsys.addaudithook(lambda *a: 1 / 0)", ("ok", "error", "died"), spoils=True),
    Hostile("excepthooks that loop", "import sys, threading\ndef hook(*a):\n    while True: pass\nsys.excepthook = sys.unraisablehook = threading.excepthook = sys.displayhook = hook\n1 / 0", ("error",), "ZeroDivisionError"),
    Hostile("codecs that lie", "import codecs, sys\ncodecs.register(lambda n: 1 / 0)\ncodecs.register_error('backslashreplace', lambda e: 1 / 0)\nprint('a\\ud800b')\n'x'", ("ok", "error", "died")),
    Hostile("locale and encoding changed", "import locale, sys\nlocale.setlocale(locale.LC_ALL, 'C')\nsys.stdout.reconfigure(encoding='utf-16')\nprint('wide')", ("ok",)),
    Hostile("streams closed", "import sys\nsys.stdout.close(); sys.stderr.close(); sys.__stdout__.close()\n40 + 2", ("ok",), "42"),
    Hostile("descriptors 0 to 2 closed", "import os\nfor fd in (0, 1, 2): os.close(fd)\n40 + 2", ("ok", "error")),
    Hostile("time frozen", "import time\ntime.sleep = time.time = time.monotonic = lambda *a: 0\ntime.sleep(99)\n40 + 2", ("ok",), "42"),
    Hostile("a generator that refuses to be closed", "def g():\n    while True:\n        try: yield 1\n        except GeneratorExit: pass\nx = g(); next(x)\ntry: x.close()\nexcept RuntimeError as e: print(e)", ("ok",), "ignored GeneratorExit"),
    Hostile("an exception chain without end", "e = None\nfor i in range(3000):\n    n = ValueError(i); n.__cause__ = e; e = n\nraise e", ("error",), "ValueError"),
    Hostile("an exception that is its own cause", "class E(Exception):\n    @property\n    def __cause__(self): return self\n    @property\n    def __traceback__(self): raise self\nraise E('round')", ("error",), "E"),
    Hostile("a metaclass that lies about its type", "class M(type):\n    @property\n    def __name__(cls): raise SystemExit(3)\n    def __instancecheck__(cls, o): raise SystemExit(3)\nclass E(BaseException, metaclass=M): pass\nraise E", ("error",)),
    Hostile("an event loop that is left running", "import asyncio\nasync def f():\n    asyncio.get_running_loop().create_task(asyncio.sleep(99))\n    asyncio.get_running_loop().call_later(0, lambda: 1 / 0)\nawait f()\n40 + 2", ("ok",), "42"),
    Hostile("a cell that stops the loop", "import asyncio\nasyncio.get_running_loop().stop()\nawait asyncio.sleep(9)", ("error",), "RuntimeError"),
    Hostile("frames of our own edited", "import sys\nf = sys._getframe()\nwhile f:\n    f.f_trace = lambda *a: 1 / 0; f.f_trace_opcodes = True\n    f = f.f_back\nsys.settrace(lambda *a: 1 / 0)", ("ok", "error", "died")),
    # The process itself.
    Hostile("writing into its own memory", "import ctypes\nctypes.memset(id(None), 0x41, 32)", ("died", "error", "ok", "timeout"), timeout_s=TIMEOUT_S),
    Hostile("jumping into data", "import ctypes, mmap\nm = mmap.mmap(-1, 4096, prot=7)\nm.write(b'\\x0f\\x0b' * 8)\nctypes.CFUNCTYPE(None)(ctypes.addressof(ctypes.c_char.from_buffer(m)))()", ("died", "error")),
    Hostile("faulthandler in a loop", "import faulthandler\nfaulthandler.enable()\nfaulthandler.dump_traceback_later(0.01, repeat=True, exit=False)\nimport time; time.sleep(0.1)\nfaulthandler._sigabrt()", ("died",), exit_code=-6),
    Hostile("another program in its place", "import os\nos.execv('/bin/true', ['true'])", ("died",), exit_code=0),
    Hostile("another program that stays", "import os\nos.execv('/bin/sleep', ['sleep', '99'])", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("another interpreter in its place", "import os, sys\nos.execv(sys.executable, [sys.executable, '-c', 'import os\\nfor fd in range(3, 300):\\n try: os.write(fd, b\"x\" * 99)\\n except OSError: pass'])", ("died",), exit_code=0),
    Hostile("limits of its own lowered", "import resource\nfor n in ('NOFILE', 'NPROC', 'FSIZE', 'STACK'):\n    resource.setrlimit(getattr(resource, 'RLIMIT_' + n), (4, 4))\n40 + 2", ("ok", "died"), ),
    Hostile("memory for itself taken away", "import resource\nresource.setrlimit(resource.RLIMIT_AS, (1, 1))\nx = bytearray(10**7)", ("error", "died")),
    Hostile("cpu time taken away", "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (1, 1))\nwhile True: pass", ("died",), timeout_s=10),
    Hostile("results turned to stdout", "import os\nfor fd in range(3, 300):\n    try: os.dup2(1, fd)\n    except OSError: pass", ("died", "timeout", "protocol_violation"), timeout_s=TIMEOUT_S),
    Hostile("stdout turned to results", "import os\nfor fd in range(200, 260):\n    try: os.fstat(fd); os.dup2(fd, 1); print('x' * 200, flush=True)\n    except OSError: pass", ("protocol_violation", "died", "timeout"), timeout_s=TIMEOUT_S),
    Hostile("commands eaten", "import os, threading\ndef eat():\n    while True:\n        for fd in range(200, 260):\n            try: os.set_blocking(fd, False); os.read(fd, 99)\n            except OSError: pass\nthreading.Thread(target=eat, daemon=True).start()\nimport time; time.sleep(0.05)", ("timeout", "died", "ok", "protocol_violation"), timeout_s=TIMEOUT_S),
    Hostile("results slowed by a full pipe", "import os, fcntl\nfor fd in range(200, 260):\n    try: fcntl.fcntl(fd, 1031, 4096)\n    except OSError: pass\n'x' * 60_000", ("ok",), "xxx"),
    Hostile("a forked child that takes the place", "import os\nif os.fork():\n    os._exit(0)\nimport time; time.sleep(99)", ("died",), exit_code=0),
    Hostile("a forked child that outlives with the pipes", "import os\nif os.fork() == 0:\n    os.setsid()\n    for fd in range(3):\n        os.close(fd)\n    import time; time.sleep(99)\n'back'", ("ok",), "back"),
    Hostile("a child that stops its parent", "import os, signal, time\np = os.getpid()\nif os.fork() == 0:\n    os.kill(p, signal.SIGSTOP); time.sleep(99)\ntime.sleep(99)", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("a thousand threads at once", "import threading\ne = threading.Event()\nn = 0\ntry:\n    for n in range(1000): threading.Thread(target=e.wait, daemon=True).start()\nexcept RuntimeError: pass\ne.set()\nprint('asked', n)", ("ok",), "asked"),
    Hostile("zombies without number", "import os\nn = 0\ntry:\n    for n in range(1000):\n        if os.fork() == 0: os._exit(0)\nexcept OSError as e: print(e)\nn < 80", ("ok",), "True"),
    Hostile("the executable rewritten", "open('/proc/self/exe', 'r+b').write(b'x')", ("error",)),
    Hostile("its own memory through proc", "import ctypes\nf = open('/proc/self/mem', 'r+b', buffering=0)\nf.seek(id(True)); f.write(b'\\0' * 24)", ("died", "ok", "error", "timeout"), timeout_s=TIMEOUT_S),
    # Too much of something.
    Hostile("a regular expression with nested repeats", "import re\nre.fullmatch(r'(x+x+)+y', 'x' * 40)", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("a gzip bomb", "import zlib\nc = zlib.compressobj(9, wbits=-15)\nblock = c.compress(bytes(2**20)) + c.flush(zlib.Z_FULL_FLUSH)\nx = zlib.decompress(block * 2048, wbits=-15)", ("error", "oom"), timeout_s=20),
    Hostile("a zip bomb into the folder", "import zipfile\nwith zipfile.ZipFile('b.zip', 'w', zipfile.ZIP_DEFLATED, compresslevel=1) as z:\n    for i in range(14): z.writestr(str(i), bytes(2**24))\nzipfile.ZipFile('b.zip').extractall('out')", ("error", "oom"), timeout_s=20),
    Hostile("a pickle bomb", "import pickle\nclass B:\n    def __reduce__(self): return (eval, (\"__import__('os')._exit(6)\",))\npickle.loads(pickle.dumps(B()))", ("died",), exit_code=6),
    Hostile("a billion laughs", "from xml.dom.minidom import parseString\ne = ''.join(f'<!ENTITY a{i} \"{(\"&a%d;\" % (i - 1)) * 10}\">' for i in range(1, 12))\nparseString(f'<!DOCTYPE x [<!ENTITY a0 \"ha\">{e}]><x>&a11;</x>')", ("error", "oom", "timeout"), timeout_s=2.0),
    Hostile("an expression nested 100,000 deep", "eval('(' * 100_000 + ')' * 100_000)", ("error", "died")),
    Hostile("a syntax tree nested deep", "import ast\ncompile('-' * 50_000 + '1', 'x', 'eval')", ("error", "died", "ok")),
    Hostile("a power tower", "9**9**9**9", ("timeout", "error", "oom"), timeout_s=TIMEOUT_S),
    Hostile("a list that contains itself, printed", "x = []\nx.append(x)\nfor _ in range(40): x = [x, x]\nx", ("timeout", "oom", "error"), timeout_s=1.0),
    Hostile("environment without end", "import os, subprocess\nos.environ.update({f'K{i}': 'v' * 10_000 for i in range(1000)})\nsubprocess.run(['true'])", ("error",), "Argument list too long"),
    Hostile("sockets without number", "import socket\nl = []\nwhile True: l.extend(socket.socketpair())", ("error",), "Too many open files"),
    Hostile("watches without number", LIBC + "fds = []\nwhile True: fds.append(check(libc.inotify_init()))", ("error",), "refused"),
    Hostile("timers and event descriptors", LIBC + "fds = []\nwhile True: fds.append(check(libc.eventfd(0, 0))); fds.append(check(libc.timerfd_create(0, 0)))", ("error",), "refused"),
    Hostile("memory files that are never mapped", "import os\nl = []\nfor i in range(64):\n    f = os.memfd_create(str(i)); l.append(f)\n    for _ in range(16): os.write(f, bytes(2**20))", ("oom", "error"), backends=("docker",)),
    Hostile("memory locked", LIBC + "import mmap\nm = mmap.mmap(-1, 2**28)\ncheck(libc.mlockall(3))", ("error", "oom", "ok")),
    Hostile("a pipe that nobody reads", "import os\nr, w = os.pipe()\nwhile True: os.write(w, b'x' * 65536)", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("a fifo that nobody opens", "import os\nos.mkfifo('f')\nopen('f').read()", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("a deadlock of locks", "import threading\nl = threading.Lock()\nl.acquire()\nl.acquire()", ("timeout",), timeout_s=TIMEOUT_S),
    Hostile("a lock on a file of the image", "import fcntl, os\nf = open(os.__file__)\nfcntl.flock(f, fcntl.LOCK_EX)\n'held'", ("ok",), "held"),
    Hostile("a sparse file of a petabyte", "import os\nf = open('s', 'wb')\nos.truncate('s', 2**50)", ("ok", "error", "died")),
    Hostile("names as long as names get", "import os\nfor i in range(300): open(str(i).zfill(255), 'w').close()\np = '.'\nfor _ in range(100):\n    os.mkdir('d' * 255); os.chdir('d' * 255)", ("ok",)),
    Hostile("a hard link farm", "import os\nopen('a', 'w').close()\nfor i in range(3000): os.link('a', f'l{i}')", ("ok",)),
    Hostile("output in single bytes", "import os\nfor _ in range(20_000): os.write(1, b'x')", ("ok",), "xxx"),
    Hostile("terminal escapes by the thousand", "print('\\x1b]0;x\\x07\\x1b[2J\\x1b[?1049h' * 1000)", ("ok",)),
    # The kernel.
    refused("a ring of io_uring", syscall("io_uring_setup", "8", "ctypes.create_string_buffer(120)")),
    refused("userfaultfd", syscall("userfaultfd", "0")),
    refused("performance counters", syscall("perf_event_open", "ctypes.create_string_buffer(b'\\0\\0\\0\\0\\x70', 112)", "0", "-1", "-1", "0")),
    refused("a program for the kernel", syscall("bpf", "0", "ctypes.create_string_buffer(72)", "72")),
    refused("a key for the session", syscall("add_key", "b'user'", "b'secret'", "b's'", "1", "-3")),
    refused("reading keys", syscall("keyctl", "0", "-4", "1")),
    refused("a new root", syscall("pivot_root", "b'.'", "b'.'")),
    refused("joining a namespace", "import os\n" + syscall("setns", "os.open('/proc/self/ns/net', 0)", "0")),
    refused("a file handle from outside", syscall("open_by_handle_at", "-100", "ctypes.create_string_buffer(b'\\x08\\0\\0\\0\\x01\\0\\0\\0\\x02', 32)", "0")),
    refused("another process's memory", syscall("process_vm_readv", "1", "ctypes.create_string_buffer(16)", "1", "ctypes.create_string_buffer(16)", "1", "0")),
    refused("a module for the kernel", syscall("init_module", "b'x'", "1", "b''")),
    refused("the kernel's log", "open('/dev/kmsg').read(1)"),
    refused("the machine's memory", "open('/dev/mem', 'rb').read(1)"),
    refused("the disk", "import os\nos.open('/dev/sda', os.O_RDONLY)"),
    refused("watching every file", syscall("fanotify_init", "0", "0")),
    refused("I/O priority of the first process", syscall("ioprio_set", "1", "1", "0x4007")),
    refused("namespaces by clone", LIBC + f"check(libc.syscall({_MACHINES[os.uname().machine][2]}, 0x10000011, 0, 0, 0, 0))"),
    refused("capabilities taken back", LIBC + "check(libc.prctl(47, 2, 21, 0, 0))"),
    refused("a set-user-id copy of a shell", "import os, shutil, subprocess\nshutil.copy('/bin/true', 's')\nos.chmod('s', 0o4755)\nassert subprocess.run(['./s']).returncode == 0 and os.geteuid() == 0"),
    refused("its memory raised", "import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (10**6, 10**6))"),
    refused("the cgroup's limit lifted", "import glob\nfor p in glob.glob('/sys/fs/cgroup/**/memory*max', recursive=True) + glob.glob('/sys/fs/cgroup/memory/memory.limit_in_bytes') + ['/sys/fs/cgroup/x']: open(p, 'w').write('max')"),
    refused("the engine's socket", "import socket\nsocket.socket(socket.AF_UNIX).connect('/var/run/docker.sock')"),
    refused("the cloud's metadata", "import urllib.request\nurllib.request.urlopen('http://169.254.169.254/', timeout=3)"),
    refused("packets by hand", "import socket\nsocket.socket(socket.AF_PACKET, socket.SOCK_RAW, 3)"),
    refused("an address of its own", "import fcntl, socket, struct\nfcntl.ioctl(socket.socket(), 0x8914, struct.pack('16sH14x', b'lo', 0))"),
    # Lines of SANDBOX.md, to the letter.
    Hostile("SystemExit by another name", "class E(SystemExit): pass\nraise E(7)", ("error",), exit_code=7),
    Hostile("KeyboardInterrupt", "raise KeyboardInterrupt", ("error",), "KeyboardInterrupt"),
    Hostile("asyncio.run in a cell", "import asyncio\nasync def f(): return 4\nasyncio.run(f())", ("ok",), "4"),
    Hostile("10 MB of code", "x = '" + "a" * 10_000_000 + "'", ("error",), "refused"),
    Hostile("a character across two writes", "import os, time\nos.write(1, b'\\xe2\\x82'); time.sleep(0.05); os.write(1, b'\\xac')", ("ok",), "€", "\\x"),
    Hostile("characters across the cap", "print('a' + '€' * 200_000)", ("ok",), "omitted", "\\x"),
    Hostile("many files that fill the folder", "for i in range(4000): open(f'f{i}', 'wb').write(bytes(2**16))", ("error", "oom"), backends=("docker",)),
    Hostile("a child that holds stdout, at once", "import subprocess\nsubprocess.Popen(['sleep', '99'])\nprint('back')", ("ok",), "back", within_s=5.0),
    Hostile("pip fails fast", "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'pip', 'install', '--retries', '0', 'left-pad']).returncode", ("ok",), within_s=15.0),
    refused("unreachable at once", "import socket\nsocket.create_connection(('10.0.0.1', 80), timeout=20)", within_s=5.0),
    refused("writing the first process's memory", "open('/proc/1/mem', 'r+b').write(b'x')"),
    refused("links to the outside, written through", "import os\nfor t in ('/etc/passwd', '/usr/bin/env'):\n    os.symlink(t, 'l' + str(len(t)))\nfor n in os.listdir('.'): open(n, 'a').write('x')"),
]  # fmt: skip


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["docker", "process"])
async def pool(request):
    """One box, so that each episode gets the one that the last has left."""
    need("docker" if request.param == "docker" else "bubblewrap")
    config = SandboxConfig(
        backend=request.param,
        confinement="bubblewrap",
        min_sessions=1,
        max_sessions=1,
        run=f"more-hostile-{os.getpid()}",
    )
    async with SandboxPool(config) as pool:
        yield pool


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_hostile_cell(pool, case):
    await judge(pool, case)


# What one episode leaves, and how the next would find it: each prints FOUND or something else.
LEGACIES = {
    "a key": (
        syscall("add_key", "b'user'", "b'secret'", "b's'", "1", "-4"),
        LIBC + f"r = libc.syscall({_BY_ARCHITECTURE['request_key'][COLUMN]}, b'user', b'secret', 0, -4)\nprint('FOUND' if r >= 0 else 'no')",
    ),
    "a message queue": (
        LIBC + "check(libc.mq_open(b'/secret', os.O_CREAT | os.O_RDWR, 0o600, None))",
        LIBC + "print('FOUND' if libc.mq_open(b'/secret', os.O_RDWR) >= 0 else 'no')",
    ),
    "a name among sockets": (
        "import os, socket, time\nif os.fork() == 0:\n    s = socket.socket(socket.AF_UNIX)\n    s.bind('\\0secret'); s.listen(); time.sleep(99)\ntime.sleep(0.1)",
        "import socket\nprint('FOUND' if socket.socket(socket.AF_UNIX).connect_ex('\\0secret') == 0 else 'no')",
    ),
    "a port": (
        "import os, socket, time\nif os.fork() == 0:\n    s = socket.socket()\n    s.bind(('127.0.0.1', 4242)); s.listen(); time.sleep(99)\ntime.sleep(0.1)",
        "import socket\nprint('FOUND' if socket.socket().connect_ex(('127.0.0.1', 4242)) == 0 else 'no')",
    ),
    "a module beside the cells": (
        "open('json.py', 'w').write('secret = 1')\nopen('sitecustomize.py', 'w').write('secret = 1')",
        "import json, sys\nprint('FOUND' if hasattr(json, 'secret') or 'sitecustomize' in sys.modules and hasattr(sys.modules['sitecustomize'], 'secret') else 'no')",
    ),
    "a name of its own": (
        "import ctypes\nctypes.CDLL(None).prctl(15, b'secret', 0, 0, 0)",
        "print('FOUND' if 'secret' in open('/proc/self/comm').read() + open('/proc/1/comm').read() else 'no')",
    ),
    "an umask, a folder and a random state": (
        "import os, random\nos.umask(0o777); os.makedirs('secret'); random.seed(1)",
        "import os, random\nm = os.umask(0o22)\nr = random.random()\nprint('FOUND' if m == 0o777 or os.path.exists('secret') or r == 0.13436424411240122 else 'no')",
    ),
}  # fmt: skip


@pytest.mark.parametrize("legacy", LEGACIES)
async def test_the_next_episode_inherits_nothing(pool, legacy):
    leave, find = LEGACIES[legacy]
    async with await pool.acquire(episode_id="leaves") as session:
        await session.run(leave, timeout_s=ENOUGH_S)
    async with await pool.acquire(episode_id="finds") as session:
        found = await session.run(find, timeout_s=ENOUGH_S)
        assert found.status == "ok" and found.stdout == "no\n", found


@pytest.mark.parametrize("legacy", LEGACIES)
async def test_a_box_beside_it_sees_nothing(pool, legacy):
    leave, find = LEGACIES[legacy]
    async with (
        SandboxPool(pool.config) as other,
        await pool.acquire(episode_id="leaves") as left,
        await other.acquire(episode_id="finds") as right,
    ):
        await left.run(leave, timeout_s=ENOUGH_S)
        found = await right.run(find, timeout_s=ENOUGH_S)
        assert found.status == "ok" and found.stdout == "no\n", found


async def test_a_gigabyte_of_output_leaves_the_host_s_memory_flat(pool):
    async with await pool.acquire(episode_id="flat") as session:
        before = resident_mib()
        for code in ("import os\nwhile True: os.write(2, b'y' * 65536)", "print('x' * 10**9)"):
            result = await session.run(code, timeout_s=ENOUGH_S)
            assert result.status in ("output_limit", "oom", "error") and len(result.stdout + result.stderr) < 2**18
        assert resident_mib() - before < 16


async def test_a_reset_after_a_fork_bomb_takes_less_than_a_tenth_of_a_second(pool):
    """Told by the box itself; the best of five, for the machine may be busy."""
    times = []
    for _ in range(5):
        session = await pool.acquire(episode_id="bomb")
        await session.run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass", timeout_s=0.2)
        assert session._box is not None
        frame = await session._box.channel.request({"op": "reset"}, deadline_s=ENOUGH_S)
        assert frame.header["clean"], frame.header
        times.append(frame.header["wall_s"])
        await session.release()
    assert min(times) < 0.1, times


async def test_a_run_after_a_forged_result_is_not_shifted(pool):
    forge = (
        "import os, struct, sys\nf = sys._getframe()\nwhile f:\n    l = f.f_locals\n"
        "    if 'token' in l and 'result' in l: token, fd = l['token'], l['result']\n    f = f.f_back\n"
        "os.write(fd, struct.pack('>B16sBBiII', 1, token, 0, 0, 0, 6, 0) + b'forged')"
    )
    async with await pool.acquire(episode_id="shift") as session:
        for number in range(5):
            assert (await session.run(forge, timeout_s=ENOUGH_S)).status == "protocol_violation"
            assert (await session.run(f"{number} + 100", timeout_s=ENOUGH_S)).value == str(number + 100)


async def test_a_reader_that_is_slow_gets_every_byte_of_a_large_file(pool):
    async with await pool.acquire(episode_id="file") as session:
        await session.run("open('f', 'wb').write(bytes(range(256)) * 2**15)", timeout_s=ENOUGH_S)
        started = time.monotonic()
        reading = asyncio.create_task(session.get("f"))
        await asyncio.sleep(0)
        time.sleep(0.2)  # noqa: ASYNC251  the host's loop hangs on purpose
        assert await reading == bytes(range(256)) * 2**15 and time.monotonic() - started < ENOUGH_S


def resident_mib() -> float:
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
