"""Runs beside one another: their folders read, grouped over seeds, compared with intervals, written as tables."""
