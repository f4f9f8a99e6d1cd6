"""From the participants' updates to the next global model: weights, sums, privacy noise, server optimizers."""
