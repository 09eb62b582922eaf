"""Scores of single tokens -> perplexity, KL divergence and their errors."""
