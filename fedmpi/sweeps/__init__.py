"""Many runs from one file: which they are, the shards they need, what became of them, and starting them."""
