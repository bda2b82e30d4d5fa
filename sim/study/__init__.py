"""Studies: many simulations, one answer. ``sweep`` varies any key of a scenario, ``plan`` finds the cheapest fleet."""
