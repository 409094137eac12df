"""From one `cluster:` section to a running job: Kubernetes (KubeRay), Slurm, Compose, or Ray's own launcher.

A target renders files and says how they are submitted; `submission` does it, follows the logs and returns the run's exit code.
"""

from toolrl.app.launch.target import Rendered, render, targets

__all__ = ["Rendered", "render", "targets"]
