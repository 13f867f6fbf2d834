"""Structures: how the metric is approximated, kept over steps and solved with."""
