"""All of K-FAC, from per-example inputs and cotangents to blocks of a metric. A kind of block and its estimator share a
file.

Imports `_program`, `_uses`, `_point`."""
