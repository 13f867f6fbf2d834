r"""Tangent vectors and covectors of the parameters as two types, which cannot be added by mistake.

Both hold a tree like the parameters. In new units $w' = A w$ a vector becomes $A v$ and a covector $A^{-\top} c$, so a
sum of the two has no meaning. A metric turns one into the other."""

from typing import Any

import equinox as eqx
from jaxtyping import PyTree

from natgrad import _tree
from natgrad._check import caller
from natgrad._types import Scalar

MIXED = (
    "A gradient is a covector: it takes a step and returns a change of cost. It is not itself a step, and adding it to "
    "a vector or to parameters gives different answers in different units. Turn it into a vector with a metric first: "
    "`natgrad.sharp(metric, covector)` (and back with `natgrad.flat(metric, vector)`)."
)


class _Tangent(eqx.Module):
    """An element of a vector space: can be added to its own type, and multiplied by numbers."""

    tree: PyTree

    def __add__(self, other: Any):
        if type(other) is not type(self):
            raise mixed_sum(self, other)
        return type(self)(_tree.add(self.tree, other.tree))

    def __radd__(self, other: Any):
        raise mixed_sum(other, self)

    def __sub__(self, other: Any):
        if type(other) is not type(self):
            raise mixed_sum(self, other)
        return type(self)(_tree.subtract(self.tree, other.tree))

    def __rsub__(self, other: Any):
        raise mixed_sum(other, self)

    def __mul__(self, factor: Any):
        return type(self)(_tree.scale(factor, self.tree))

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any):
        return type(self)(_tree.scale(1 / divisor, self.tree))

    def __neg__(self):
        return type(self)(_tree.scale(-1.0, self.tree))


class Vector(_Tangent):
    """A direction to move in: a tangent vector of the parameters. Maps push it forward.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    step = -0.1 * ng.Vector({"w": jnp.ones(2)})
    assert jnp.allclose(step.displace({"w": jnp.zeros(2)})["w"], -0.1)
    ```
    """

    def displace(self, params: PyTree, step: Scalar | float = 1.0) -> PyTree:
        """The parameters moved along this vector."""
        return _tree.add(params, _tree.scale(step, self.tree))


class Covector(_Tangent):
    """A linear function of directions, such as a gradient. Maps pull it back.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    slope = ng.Covector(jax.grad(lambda w: w @ w)(jnp.array([1.0, 2.0])))
    assert jnp.allclose(slope(ng.Vector(jnp.array([0.0, 1.0]))), 4.0)  # the change of the cost in a direction
    ```
    """

    def __call__(self, vector: Any) -> Scalar:
        """The pairing with a vector: for a gradient, the rate of change of the cost along it."""
        if not isinstance(vector, Vector):
            raise TypeError(
                f"A covector takes a `Vector`, but got `{type(vector).__name__}`. Wrap it in `natgrad.Vector`."
            )
        return _tree.vdot(self.tree, vector.tree)

    def displace(self, params: PyTree, step: Scalar | float = 1.0) -> PyTree:
        del params, step
        raise TypeError(f"Parameters cannot be moved along a `Covector`. {MIXED}")


def mixed_sum(left: Any, right: Any) -> TypeError:
    """The error for a sum of a vector with a covector, or of one of them with a plain tree."""
    return TypeError(f"Cannot add `{type(left).__name__}` and `{type(right).__name__}`. {MIXED}")


def untyped(value: PyTree, expected: type) -> tuple[PyTree, bool]:
    """The plain tree inside `value`, and whether `value` was of the `expected` type; the other type is refused."""
    if isinstance(value, expected):
        return value.tree, True
    if isinstance(value, _Tangent):
        raise TypeError(f"{caller()} takes a `{expected.__name__}`, but got a `{type(value).__name__}`. {MIXED}")
    return value, False
