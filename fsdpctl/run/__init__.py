"""The files of a run directory: configuration, lock, metrics, heartbeat and environment."""
