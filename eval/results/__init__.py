"""What a run yields, results.json, merged runs, differences between two models."""
