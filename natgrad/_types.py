"""Names for the things that flow through the library, and the legend of shape letters.

Shape letters in comments and annotations: `N` examples in a batch, `C` cotangents or columns of
a factor, `K` classes, `d` dimension of a vector observation, `P` parameters in all.
"""

from typing import TypeAlias

import equinox as eqx
from jaxtyping import Array, Float, PRNGKeyArray, PyTree

Scalar: TypeAlias = Float[Array, ""]
Matrix: TypeAlias = Float[Array, "rows columns"]

# One example's output of a model, a tangent to it, or a cotangent: all have the same structure.
Output: TypeAlias = PyTree

# Natural parameters `eta` and moments `xi` of an exponential family: one array, or a tuple of them.
Natural: TypeAlias = PyTree
Moments: TypeAlias = PyTree
Observation: TypeAlias = PyTree

Key: TypeAlias = PRNGKeyArray | Array


class Estimate(eqx.Module):
    """A random estimate and, entry by entry, the standard error of its mean."""

    value: PyTree
    standard_error: PyTree
