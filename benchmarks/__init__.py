"""Speed by ratio: what the simulator does in a CPU second, beside a fixed loop timed in the same process."""
