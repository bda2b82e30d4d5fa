"""Which site on the way inwards serves a request."""
