"""Mediators: groups of clients trained sequentially (Astraea; Duan et al. 2019, Algorithms 1 and 3)."""
