"""The command line: flags, checks before a run, outputs, the cache."""
