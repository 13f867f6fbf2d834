"""K-FAC and EKFAC: from per-example inputs and cotangents to blocks of a metric.

A *block* is a symmetric operator on a few entries of the parameters; an *estimator* computes it from a batch. `choose`
picks an estimator for every parameter, and `damped` inverts the blocks.

Imports `_program`, `_uses`, `_point`."""
