"""Metrics on the parameters, as linear operators: pullback, Hessian, diagonal, blocks.

Imports `_geometry`, `_point`, `_block`."""
