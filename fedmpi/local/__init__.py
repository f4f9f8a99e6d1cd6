"""A client's local work: one definition (work, schedule), several engines that agree to rounding."""
