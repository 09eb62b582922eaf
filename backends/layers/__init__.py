"""Linear layers: what their schemes are called, how they ran, noise on their outputs."""
