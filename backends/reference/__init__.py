"""The reference store: states or logits of one model, with which others are compared."""
