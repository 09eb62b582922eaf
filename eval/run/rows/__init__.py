"""Rows of the table: a model scores each text of a run, in workers that load it once."""
