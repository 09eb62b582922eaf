"""Draw the numbers of a run as pictures."""
