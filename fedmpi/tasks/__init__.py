"""Learning tasks: losses, metrics and evaluation."""
