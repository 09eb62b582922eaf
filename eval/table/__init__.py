"""The table of the results, its footnotes, and comparisons of two rows."""
