"""Drivers of other simulators: the same clients, cohorts, network and initial weights, FedAvg as each ships it."""
