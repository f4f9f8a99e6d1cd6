"""What a machine or an allocation offers to a run, and what is wrong with it."""
