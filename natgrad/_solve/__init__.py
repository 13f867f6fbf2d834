"""Linear systems with a damped metric, and natural gradients.

Imports `_geometry`, `_point`, `_metric`."""
