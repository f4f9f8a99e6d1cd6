"""Copies of scarce classes' samples (Astraea, Algorithm 2): how many, whose, and how their images are distorted."""
