"""Numbers -> pictures."""
