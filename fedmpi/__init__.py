"""fedmpi: a parallel simulator for sampling strategies in federated learning."""

__version__ = "0.1.0"
