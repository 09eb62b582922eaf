"""Measure the cost of a whole table: ``python -m benchmarks.table``."""
