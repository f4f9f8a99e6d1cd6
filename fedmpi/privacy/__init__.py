"""Private sizes and private updates: mechanisms, their cost, and their total privacy loss."""
