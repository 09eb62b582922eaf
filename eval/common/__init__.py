"""Files, the cache, progress and processes, which every part of the driver uses."""
