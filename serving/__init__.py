"""What the simulator and the engine share: requests, KV pages, plans, the scheduler and its policies."""
