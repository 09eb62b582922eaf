"""Model files: their headers, configs, formats, and the bits that they store."""
