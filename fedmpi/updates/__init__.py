"""How updates travel, and what they weigh on the links."""
