"""Steps from client updates to the next global model: weights, sums, privacy noise, server optimizers."""
