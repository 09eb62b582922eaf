"""Score the windows with every model, and make the rows of the table."""
