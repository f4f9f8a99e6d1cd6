"""Drivers of other simulators: the same clients, cohorts, network and initial weights, with each simulator's FedAvg."""
