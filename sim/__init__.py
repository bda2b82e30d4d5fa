"""The first clock: a SimPy model of a GPU fleet driven by the shared scheduler."""
