"""What scoring costs, how often intervals cover, and compare_q beside other tools."""
