"""Results -> the table, its footnotes, comparisons of two rows."""
