"""What a machine or an allocation offers to a run, and problems with it."""
