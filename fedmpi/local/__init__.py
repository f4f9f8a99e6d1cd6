"""A client's local work: one definition (work, schedule) and several engines, equal up to floating-point rounding."""
