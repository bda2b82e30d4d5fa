"""Is a policy worse than the one it replaces? Paired replications, a gate, and properties that every scheduler must have."""
