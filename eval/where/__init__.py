"""``compare-q where``: which modules of a quantized model cause how much of its KLD."""
