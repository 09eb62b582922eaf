"""What a run yields, results.json, rows of several runs, differences between two models."""
