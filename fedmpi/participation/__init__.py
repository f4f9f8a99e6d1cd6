"""Which clients take part: draws, strata, allocation, availability (pure functions over arrays)."""
