"""The run's folder: records, checkpoints, models, progress, where it all came from."""
