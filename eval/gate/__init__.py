"""The gate: several ways to run one model, and whether each still computes what the first one does."""
