"""Jobs of a batch system: what a site wants in every script, the scripts themselves, and handing them to SLURM."""
