"""What a step, a transfer or a collective costs on a given GPU; knows nothing of scheduling."""
