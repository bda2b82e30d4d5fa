"""Real against simulated: calibration, comparison, parity, regressions, reports."""
