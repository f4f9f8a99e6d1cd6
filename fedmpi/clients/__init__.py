"""Who takes part: draws, strata, availability, devices."""
