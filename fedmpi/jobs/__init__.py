"""Job scripts for SLURM, and their submission."""
