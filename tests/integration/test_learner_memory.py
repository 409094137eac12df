"""Log-probabilities, entropies and their backward pass over 32 K tokens and a vocabulary of 150 K: peak resident memory.

Whole logits would be 18 GiB. Each case is a process of its own, because a process's peak never falls.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.requirements import need

need("torch")

VOCABULARY = 150_000
GIB = 2**30
CODE = """
import json, resource, sys
import torch
from learner.logprobs import token_logprobs

tokens, chunk, dtype = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3])
torch.set_num_threads(1)  # two on shared cores wait for each other: twice the processor time
torch.manual_seed(0)
head = torch.nn.Linear(8, 150_000, bias=False, dtype=dtype)
hidden = torch.randn(tokens, 8, dtype=dtype, requires_grad=True)
targets = torch.randint(0, 150_000, (tokens,))
head.weight.grad, hidden.grad = torch.zeros_like(head.weight), torch.zeros_like(hidden)
(head(hidden[:2]).sum() * 0).backward()  # kernels and their workspaces are loaded
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
logp, entropy = token_logprobs(head, hidden, targets, pieces=-(-tokens // chunk))
assert logp.shape == entropy.shape == (tokens,) and logp.dtype == torch.float32
logp.sum().backward()
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert torch.isfinite(hidden.grad).all() and head.weight.grad.abs().sum() > 0
print(json.dumps((after - before) * 1024))
"""


def extra_bytes(tokens: int, chunk: int, dtype: str) -> int:
    arguments = [sys.executable, "-c", CODE, str(tokens), str(chunk), dtype]
    # Freed blocks go back at once: otherwise small ones that live on split the holes of large ones, and the peak is glibc's.
    # In huge pages, or most of the time would be page faults.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=550, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    return int(json.loads(done.stdout))


@pytest.mark.slow  # most of a minute of one idle core
@pytest.mark.timeout(420)
def test_32k_tokens_and_a_vocabulary_of_150k_take_less_than_2_gib():
    assert extra_bytes(32_768, 128, "float32") < 2 * GIB


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_chunk_takes_less_than_2_gib(dtype):
    assert extra_bytes(2 * 1024, 1024, dtype) < 2 * GIB


def test_peak_memory_does_not_grow_with_the_length():
    short, long = extra_bytes(128, 32, "float32"), extra_bytes(1024, 32, "float32")
    assert long < short + 32 * VOCABULARY * 4
