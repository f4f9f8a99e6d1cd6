"""Properties of a machine or an allocation that matter to a run, and problems with it."""
