"""What is promised, as cells to run and what must come of them.

A probe is one cell and a judgement of its result. Promises of a container alone name the backend; where a backend makes
no such promise the probe is told as such, not skipped in silence.
"""

# ruff: noqa: E501  one cell a line
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sandbox.result import RunResult

DOCKER, GVISOR, CONFINED, PLAIN = "a container", "a container of gVisor", "bubblewrap", "a plain process"
EVERYWHERE = (DOCKER, GVISOR, CONFINED, PLAIN)
BOUNDED = (DOCKER, GVISOR, CONFINED)
_ENOUGH_S = 20.0


@dataclass(frozen=True)
class Probe:
    """`holds` says whether the promise was kept; `measured` what to show beside it. `kinds`: where it is promised."""

    promise: str
    code: str
    holds: Callable[[RunResult], bool]
    kinds: tuple[str, ...] = EVERYWHERE
    timeout_s: float = _ENOUGH_S
    measured: Callable[[RunResult], str] = lambda result: ""


def _value(expected: str) -> Callable[[RunResult], bool]:
    return lambda result: result.status == "ok" and result.value == expected


def _status(*expected: str) -> Callable[[RunResult], bool]:
    return lambda result: result.status in expected


def _refused(result: RunResult) -> bool:
    return result.status == "error" and any(name in result.stderr for name in ("Error", "error"))


def _at_most(limit: float) -> Callable[[RunResult], bool]:
    return lambda result: result.status == "ok" and result.value is not None and float(result.value) <= limit


def _shown(result: RunResult) -> str:
    return result.value or ""


NOTEBOOK = (
    Probe("state lives over the cells of an episode", "x = 6 * 7\nx", _value("42")),
    Probe("the last expression is echoed, a semicolon suppresses it", "x + 1;", lambda r: (r.status, r.value) == ("ok", None)),
    Probe("`await` at top level", "import asyncio\nawait asyncio.sleep(0, 'slept')", _value("'slept'")),
    Probe("an error is told with the user's frames only", "def f(): return 1 / 0\nf()", lambda r: r.status == "error" and "ZeroDivisionError" in r.stderr and "<cell" in r.stderr and "/sandbox/" not in r.stderr),
    Probe("input() ends with EOFError", "input()", lambda r: r.status == "error" and "EOFError" in r.stderr),
    Probe("output of child processes is captured", "import subprocess\nsubprocess.run(['echo', 'child']).returncode", lambda r: r.stdout == "child\n"),
    Probe("sys.exit is an error, its code is told", "import sys\nsys.exit(5)", lambda r: (r.status, r.exit_code, r.state_lost) == ("error", 5, False)),
    Probe("multiprocessing works", "from multiprocessing import Pool\nwith Pool(2) as p: r = p.map(abs, [-1, -2])\nr", _value("[1, 2]")),
)  # fmt: skip

ENDINGS = (
    Probe("a death is told with its code", "import os\nos._exit(3)", lambda r: (r.status, r.exit_code) == ("died", 3) and r.state_lost),
    Probe("a crash is told with its signal", "import ctypes\nctypes.string_at(0)", lambda r: (r.status, r.exit_code) == ("died", -11)),
    Probe("output is capped: head and tail are kept, bytes counted", "print('head' + 'x' * 300_000 + 'tail')", lambda r: r.truncated and r.stdout.startswith("head") and r.stdout.endswith("tail\n") and r.stdout_bytes == 300_009 and "omitted" in r.stdout),
    Probe("endless output is stopped", "import os\nwhile True: os.write(1, b'x' * 65536)", _status("output_limit"), measured=lambda r: f"{r.stdout_bytes / 2**20:.0f} MiB"),
    Probe("memory beyond the limit is a MemoryError or `oom`", "hold = []\nwhile True: hold.append(bytearray(2**22))", lambda r: r.status == "oom" or (r.status == "error" and "MemoryError" in r.stderr), measured=lambda r: r.status),
    Probe("a forged result is refused", "import os, struct, sys\nf = sys._getframe()\nwhile f:\n    l = f.f_locals\n    if 'token' in l and 'result' in l: token, fd = l['token'], l['result']\n    f = f.f_back\nos.write(fd, struct.pack('>B16sBBiII', 1, token, 0, 0, 0, 6, 0) + b'forged')", _status("protocol_violation")),
    Probe("the run after it is not shifted", "6 * 7", _value("42")),
    Probe("a child that holds stdout holds up nothing", "import subprocess\nsubprocess.Popen(['sleep', '60'])\n'back'", lambda r: r.value == "'back'" and r.wall_s < 5),
    Probe("bytes that are no text come as escapes", "import os\nos.write(1, b'a\\xff\\xe2\\x82\\xac')", lambda r: r.stdout == "a\\xff€"),
)  # fmt: skip

_STATUS_FIELDS = (
    "fields = dict(line.split(':\\t') for line in open('/proc/self/status').read().splitlines() if ':\\t' in line)\n"
)
CONFINEMENT = (
    Probe("no network: nothing outside can be reached", "import socket\nsocket.create_connection(('1.1.1.1', 53), timeout=3)", _refused, BOUNDED),
    Probe("no network: names are not resolved", "import socket\nsocket.gethostbyname('example.com')", _refused, BOUNDED),
    Probe("no network: there is no interface but the loopback", "import socket\n[name for _, name in socket.if_nameindex() if name != 'lo' and not name.startswith(('tunl', 'sit', 'gre', 'erspan', 'ip_vti', 'ip6'))]", _value("[]"), BOUNDED),
    Probe("the root file system is read-only", "import os\n[p for p in ('/', '/etc', '/usr', '/usr/bin') if os.access(p, os.W_OK)] + [1] * ('ro' not in [l.split()[5].split(',') for l in open('/proc/self/mountinfo') if l.split()[4] == '/'][-1])", _value("[]"), BOUNDED),
    Probe("a user of its own, not root", "import os\nmin(os.getuid(), os.geteuid(), os.getgid(), os.getegid()) > 0", _value("True"), BOUNDED),
    Probe("becoming root is refused", "import os\nos.setuid(0)", _refused, BOUNDED),
    Probe("all capabilities are dropped", _STATUS_FIELDS + "sum(int(fields.get(name, '0'), 16) for name in ('CapInh', 'CapPrm', 'CapEff', 'CapAmb')) + int(fields['CapBnd'], 16) * DOCKER", _value("0"), BOUNDED),
    Probe("no new privileges", "import ctypes\nctypes.CDLL(None).prctl(39, 0, 0, 0, 0)", _value("1")),
    Probe("a system call filter is on", _STATUS_FIELDS + "fields['Seccomp'].strip()", _value("'2'")),
    Probe("no new namespaces", "import ctypes\nlibc = ctypes.CDLL(None, use_errno=True)\nlibc.unshare(0x10000000)", _value("-1")),
    Probe("the first process cannot be looked into", "import os\n[os.access(f'/proc/1/{name}', os.R_OK) for name in ('environ', 'mem', 'fd', 'maps')] if os.getppid() == 1 else [False]\nfor name in ('environ', 'mem'):\n    try: open(f'/proc/{os.getppid()}/{name}', 'rb').read(1); print('read', name)\n    except OSError: pass", lambda r: r.status == "ok" and not r.stdout, (DOCKER, CONFINED, PLAIN)),
    Probe("no process but the box's own is seen", "import os\nsorted(int(p) for p in os.listdir('/proc') if p.isdigit()) == [1, os.getpid()]", _value("True"), BOUNDED),
    Probe("processes are bounded", "import os, time\nn = 0\ntry:\n    for n in range(1000):\n        if os.fork() == 0: time.sleep(60)\nexcept OSError: pass\nn", _at_most(64), (DOCKER, CONFINED), measured=lambda r: f"{r.value} more"),
)  # fmt: skip

CONTAINER = (
    Probe("memory of the whole box is bounded by the kernel", "import glob\nmin(float(open(p).read().replace('max', 'inf')) for p in glob.glob('/sys/fs/cgroup/memory.max') + glob.glob('/sys/fs/cgroup/memory/memory.limit_in_bytes')) / 2**20", _at_most(512), (DOCKER,), measured=lambda r: f"{float(r.value or 0):.0f} MiB"),
    Probe("cpu of the whole box is bounded", "import os\nif os.path.exists('/sys/fs/cgroup/cpu.max'):\n    quota, period = open('/sys/fs/cgroup/cpu.max').read().split()\nelse:\n    quota, period = (open(f'/sys/fs/cgroup/cpu/cpu.cfs_{name}_us').read() for name in ('quota', 'period'))\nfloat(quota.replace('max', 'inf')) / float(period) if quota.strip() != '-1' else float('inf')", _at_most(1.0), (DOCKER,), measured=lambda r: f"{float(r.value or 0):.2f} cores"),
    Probe("files are bounded in number", "n = 0\ntry:\n    for n in range(10**5): open(f'f{n}', 'w').close()\nexcept OSError: pass\nn", _at_most(16384), (DOCKER,), measured=_shown),
)  # fmt: skip
FILES = (
    Probe("files are bounded in size", "n = 0\ntry:\n    with open('big', 'wb', buffering=0) as f:\n        for n in range(4096):\n            if not f.write(bytes(2**20)): break\nexcept OSError: pass\nn", _at_most(512), measured=lambda r: f"{r.value} MiB"),
)  # fmt: skip
SECRETS = "import math, os\nsecret = math.secret = os.environ['SECRET'] = 's'\nfor folder in ('.', os.environ['TMPDIR']): open(folder + '/secret', 'w').write('s')\nimport subprocess\nsubprocess.Popen(['sleep', '60'], start_new_session=True)"
FIND_SECRETS = "import math, os, sys\n['secret' in globals(), hasattr(math, 'secret'), 'SECRET' in os.environ, bool(os.listdir('.')), bool(os.listdir(os.environ['TMPDIR']))]"
