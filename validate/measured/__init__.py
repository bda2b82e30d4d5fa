"""Real servers' runs that the simulator can replay, one module per kind of data set."""
