"""Vectors and covectors, charts, invariance checks and the rank of a metric.

Imports `_geometry`, `_point`, `_metric`, `_solve`."""
