"""Windows -> scores of every model -> rows of the table."""
