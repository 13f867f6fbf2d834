"""Geometries of the output of one example: metric, dissimilarity and sampler.

Imports `_family`."""
