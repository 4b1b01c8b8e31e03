"""The runtime: driver, reconciler, cluster, journal, metrics, logs and checkpoints of a run."""
