"""Private sizes and private updates: mechanisms, what they cost, what they add up to."""
