"""What every room may use: errors, streams of random numbers, the plan, arithmetic, whole-or-absent files."""
