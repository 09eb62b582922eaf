"""Compute perplexity, KL divergence and their errors from the scores of tokens."""
