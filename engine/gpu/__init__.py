"""The parts of the prepared device check (``engine.gpu_check``): correctness, ceilings and kernels, the engine's steps, the loop to the simulator."""
