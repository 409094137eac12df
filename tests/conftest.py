"""What every test needs before torch is imported."""

import os

from hypothesis import settings

# One thread a process: the tests run beside engines and learner ranks on few cores, and small tensors gain nothing from more.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No test is about time: on a busy machine any example may take long.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
