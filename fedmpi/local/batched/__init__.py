"""The batched engine: one launch trains many clients, with the layers' weights stacked."""
