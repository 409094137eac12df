#!/bin/sh
# Builds the wheel and installs it, with its base dependencies only, into a clean environment: the command line must work there,
# without torch, Ray or vLLM, from an empty folder. Needs .venv (make setup) and pip's usual index; nothing else of the network.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT INT TERM

# A copy, so that no build leftovers of the checkout get into the wheel or are left in it.
mkdir "$work/source"
(cd "$root" && tar cf - pyproject.toml README.md toolrl actors learner sandbox deploy) | (cd "$work/source" && tar xf -)
(cd "$work/source" && "$root/.venv/bin/python" -m build --wheel --no-isolation --outdir "$work/dist" . >"$work/build.log" 2>&1) ||
    { cat "$work/build.log" >&2; exit 1; }

"$root/.venv/bin/python" -m venv "$work/venv"
"$work/venv/bin/pip" install -q "$work"/dist/toolrl-*.whl

mkdir "$work/empty"
cd "$work/empty"
# Where the checkout is not importable: what works here works for a user.
toolrl="$work/venv/bin/toolrl"
unset PYTHONPATH
"$toolrl" --version
"$toolrl" --help
for preset in quickstart-cpu single-gpu-1.5b math-4b math-14b agent-32b; do
    "$toolrl" train "$preset" --dry-run >"$work/$preset.out"
    grep -q "rollout worker" "$work/$preset.out"
done
for target in kuberay slurm compose ray; do
    source=/srv/runs
    [ "$target" != kuberay ] || source=claim
    "$toolrl" launch math-4b --target "$target" --dry-run runs_dir=/runs "cluster.mounts=[{target: /runs, source: $source}]" >/dev/null
done
"$toolrl" plan math-4b --gpu h100 --steps 1 loop.groups_per_step=4 >/dev/null
"$toolrl" config keys >/dev/null
"$toolrl" presets >/dev/null
if "$toolrl" train quickstart-cpu loop.stps=1 2>"$work/mistake.err"; then
    echo "an unknown key was accepted" >&2
    exit 1
fi
grep -q "did you mean 'loop.steps'" "$work/mistake.err"
if "$toolrl" train quickstart-cpu 2>"$work/absent.err"; then
    echo "a run started without torch" >&2
    exit 1
fi
grep -q "not installed: torch" "$work/absent.err"
"$work/venv/bin/python" -c "
import importlib.util, pkgutil, sandbox
assert importlib.util.find_spec('torch') is None, 'torch came with the base dependencies'
from importlib import resources
for package, name in (('toolrl', 'py.typed'), ('toolrl.app', 'tiny_chat_template.jinja'), ('sandbox.image', 'Dockerfile')):
    assert resources.files(package).joinpath(name).is_file(), f'{package}/{name} is not in the wheel'
"
[ -z "$(ls -A)" ] || { echo "left behind:" >&2; ls -A >&2; exit 1; }
echo "the wheel works in a clean environment"
