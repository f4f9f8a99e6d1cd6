"""Utilities for all packages: errors, random streams, the plan, arithmetic, atomic files."""
