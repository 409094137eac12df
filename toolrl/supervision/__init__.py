"""Supervision signals against format collapse (arXiv 2606.26027): what is pure of them. See docs/supervision.md.

`references`: trajectories that show how a task is done. `guidance`: which members of a group the policy did not sample by
itself. `seats`: which places of a group those are.
"""

from toolrl.supervision.references import References, is_reference

__all__ = ["References", "is_reference"]
