"""What a whole table costs: ``python -m benchmarks.table``."""
