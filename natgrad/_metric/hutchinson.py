"""Stochastic estimates of the diagonal and the trace, with their standard errors."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import caller, public
from natgrad._metric.base import AbstractMetric
from natgrad._types import Estimate, Key


@public
def diagonal_estimate(metric: AbstractMetric, key: Key, num_samples: int = 100) -> Estimate:
    r"""The diagonal of a metric as the average of $v \odot G v$ over random signs $v$ (Hutchinson).

    It costs one product a sample, whatever the number of parameters.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.DiagonalMetric(jnp.array([1.0, 4.0]))
    estimate = ng.diagonal_estimate(metric, jax.random.key(0), num_samples=2)
    assert jnp.allclose(estimate.value, jnp.array([1.0, 4.0]))  # exact for a diagonal metric
    ```
    """
    return _average(lambda key: _probe(metric, key), key, num_samples)


@public
def trace_estimate(metric: AbstractMetric, key: Key, num_samples: int = 100) -> Estimate:
    r"""The trace of a metric as the average of $v^\top G v$ over random signs $v$ (Hutchinson).

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.DiagonalMetric(jnp.array([1.0, 4.0]))
    assert jnp.allclose(ng.trace_estimate(metric, jax.random.key(0), num_samples=2).value, 5.0)
    ```
    """
    total = lambda key: jnp.sum(_tree.flatten(_probe(metric, key))[0])
    return _average(total, key, num_samples)


def _probe(metric: AbstractMetric, key: Key) -> PyTree:
    flat, unflatten = _tree.flatten(metric._zeros())
    signs = unflatten(jax.random.rademacher(key, flat.shape, flat.dtype))
    return jax.tree.map(lambda v, gv: v * gv, signs, metric.mv(signs))


def _average(draw: Any, key: Key, num_samples: int) -> Estimate:
    if num_samples < 2:
        raise ValueError(
            f"{caller()} needs at least 2 samples for a standard error, but got `num_samples={num_samples}`."
        )
    draws = jax.lax.map(draw, jax.random.split(key, num_samples))
    mean = jax.tree.map(lambda d: jnp.mean(d, axis=0), draws)
    error = jax.tree.map(lambda d: jnp.std(d, axis=0, ddof=1) / num_samples**0.5, draws)
    return Estimate(mean, error)
