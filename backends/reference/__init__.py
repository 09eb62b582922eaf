"""The reference store: states or logits of the model that other models are compared with."""
