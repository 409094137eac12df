"""The labels that say whose a container is and how long it may live."""

from __future__ import annotations

import time

from sandbox.config import SandboxConfig
from sandbox.owner import owner_name

PREFIX = "toolrl.sandbox"
BOX, RUN, OWNER, EXPIRES = f"{PREFIX}.box", f"{PREFIX}.run", f"{PREFIX}.owner", f"{PREFIX}.expires"


def labels_of(config: SandboxConfig) -> dict[str, str]:
    """Labels of a container that is made now by this process."""
    return {
        **config.labels,
        BOX: "1",
        RUN: config.run,
        OWNER: owner_name(),
        EXPIRES: str(int(time.time() + config.lease_s)),
    }
