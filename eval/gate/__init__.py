"""The gate: check that several ways to run one model compute the same."""
