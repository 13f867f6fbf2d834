"""The proximal family: proximal points, mirror descent, natural-gradient and Newton steps, trust regions.

Imports `_geometry`, `_point`, `_metric`, `_solve`."""
