"""The command line: what is asked for, what is checked first, what the cache holds."""
