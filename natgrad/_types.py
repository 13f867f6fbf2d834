"""Names for types that all rooms use, and the legend of shape letters.

| letter | size of the axis |
|---|---|
| `N` or `n` | examples of a batch |
| `C` or `c` | columns of cotangents of each example |
| `P` | parameters, flattened into one vector |
| `K` | classes |
| `g`, `t` | groups with different weights; positions that share one weight (tokens, pixels) |
| `d`, `o` | inputs and outputs of a weight; in families, `d` is the dimension of an observation |
| `m`, `k` | matrices of a stack; their rows |
"""

from typing import TypeAlias

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

Scalar: TypeAlias = Float[Array, ""]
Matrix: TypeAlias = Float[Array, "rows columns"]

# An output of a model, a tangent vector or a cotangent of it: trees with the same shapes.
Output: TypeAlias = PyTree

# Natural parameters `eta`, moments `xi` and observations of an exponential family: an array, or a tuple of arrays.
Natural: TypeAlias = PyTree
Moments: TypeAlias = PyTree
Observation: TypeAlias = PyTree

Key: TypeAlias = PRNGKeyArray | Array


class Estimate(eqx.Module):
    """A random estimate and, entry by entry, the standard error of its mean.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    estimate = ng.trace_estimate(ng.hessian(lambda w: w[0] * w[1], jnp.zeros(2)), jax.random.key(0), num_samples=50)
    assert jnp.abs(estimate.value) <= 4 * estimate.standard_error  # the trace is zero
    ```
    """

    value: PyTree
    standard_error: PyTree
