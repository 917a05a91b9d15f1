"""`launch(config)`: the configured launcher's cluster."""

from __future__ import annotations

from baton.config import ClusterConfig
from baton_cluster.cluster import Cluster, Progress, no_progress


def launch(config: ClusterConfig, *, progress: Progress = no_progress) -> Cluster:
    """Start a cluster as `config.launcher` says and return its handle, ready to serve. Takes seconds.

    Raises ConfigError, ModelError or ClusterError in one sentence, and leaves nothing behind then.
    """
    # Imported here: Ray, torch and the engine take seconds, and each launcher needs only its own.
    if config.launcher == "local":
        from baton_cluster.local import LocalCluster

        return LocalCluster(config, progress=progress)
    from baton_cluster.ray_cluster import RayCluster

    return RayCluster(config, progress=progress)
