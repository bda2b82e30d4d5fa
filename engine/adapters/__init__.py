"""Other engines under our policies: their requests seen as ours, their steps logged as our runs."""
