"""Linear layers: names of their schemes, how they ran, noise on their outputs."""
