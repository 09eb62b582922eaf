"""Measure the cost of scoring and the coverage of intervals, and compare compare_q with other
tools.
"""
