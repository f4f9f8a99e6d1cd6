"""The batched engine: clients side by side in one launch, the layers' weights stacked."""
