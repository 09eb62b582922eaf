"""The driver: specs, windows, scores, statistics, and every way to show them."""
