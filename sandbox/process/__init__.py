"""The process backend: boxes without a Docker engine, confined by bubblewrap where it works.

`launch` and `backend` run on the host's side, `main` and `owned_directory` inside a box.
"""
