"""Logits -> log-probability, entropy and KL divergence of every token."""
