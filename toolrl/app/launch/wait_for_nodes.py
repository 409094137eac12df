"""`python -m toolrl.app.launch.wait_for_nodes NODES DEADLINE_S`: returns when the cluster has so many nodes, or says which
are missing and fails."""

from __future__ import annotations

import sys
import time

LOOK_EVERY_S = 1.0


def main(nodes: int, deadline_s: float) -> int:
    """Exit code: 0 they are there, 1 they did not come."""
    import ray

    ends, said = time.monotonic() + deadline_s, -1
    while True:
        try:
            ray.init(address="auto", log_to_driver=False, logging_level="error")
            break
        except ConnectionError as error:  # the head may only just be starting
            if time.monotonic() > ends:
                print(f"Ray's head did not start in {deadline_s:g} s: {error}", file=sys.stderr)
                return 1
            time.sleep(LOOK_EVERY_S)
    try:
        while True:
            there = [node for node in ray.nodes() if node["Alive"]]
            if len(there) != said:
                print(f"{len(there)} of {nodes} nodes are there", flush=True)
                said = len(there)
            if len(there) >= nodes:
                return 0
            if time.monotonic() > ends:
                addresses = ", ".join(node["NodeManagerAddress"] for node in there)
                print(f"no more nodes came in {deadline_s:g} s; there are {addresses}", file=sys.stderr)
                return 1
            time.sleep(LOOK_EVERY_S)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), float(sys.argv[2])))
