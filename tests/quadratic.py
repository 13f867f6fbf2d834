"""A quadratic cost in three dimensions, as step rules and guards see it: no model, nothing but its matrix."""

import jax
import jax.numpy as jnp
import numpy as np

import natgrad as ng

METRIC = np.array([[3.0, 1.0, 0.0], [1.0, 2.0, 0.5], [0.0, 0.5, 1.0]])
TARGET = np.array([1.0, -2.0, 0.5])
DAMPING = 0.1


def expansion(w=None, *, curvature=METRIC, steps=3) -> ng.Expansion:
    """A quadratic cost around `TARGET` with the metric `METRIC`, which is its Hessian unless told otherwise."""
    w = jnp.zeros(3) if w is None else jnp.asarray(w)
    cost = lambda w: (w - TARGET) @ jnp.asarray(curvature) @ (w - TARGET) / 2
    return ng.Expansion(
        w=w,
        loss=cost(w),
        gradient=jax.grad(cost)(w),
        steps=jnp.asarray(steps),
        damping=jnp.asarray(DAMPING),
        penalties=jnp.asarray(0.0),
        loss_at=cost,
        inner_products=lambda vectors: jnp.stack(vectors) @ jnp.asarray(METRIC) @ jnp.stack(vectors).T,
        divergence=lambda other: (other - w) @ jnp.asarray(METRIC) @ (other - w) / 2,
    )
