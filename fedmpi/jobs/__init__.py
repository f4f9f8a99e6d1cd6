"""Job scripts for SLURM: the settings of a site, and submission."""
