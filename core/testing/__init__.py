"""For tests, demos and benchmarks: a cluster in one process (`LocalCluster`), and a deterministic model without key or
network (`understudy.testing.offline`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from understudy.cluster.local.local_cluster import LocalCluster

__all__ = ["LocalCluster"]


def __getattr__(name: str) -> Any:
    """Load it when it is first asked for: the offline model starts fast, and in a process of its own."""
    if name != "LocalCluster":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from understudy.cluster.local.local_cluster import LocalCluster

    return LocalCluster
