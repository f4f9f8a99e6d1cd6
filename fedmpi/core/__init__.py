"""The round loop, and what it is made of: the server's plan, the workers' tasks, the sum, the record."""
