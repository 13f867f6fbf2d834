"""Learning from a stream: online maximum likelihood, and the natural gradient as a Kalman filter.

Imports `_family`, `_optimiser`."""
