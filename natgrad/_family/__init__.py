"""Exponential families, one or two a file: log-partition function, moments, sampling, Fisher metric.

Imports no other room."""
