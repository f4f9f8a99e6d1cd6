"""Client selection: samplers, strata, availability, devices."""
