r"""Maps between vectors and covectors, $G v$ and $G^+ c$, and along a function, $\partial f\,v$ and $\partial f^\top
c$."""

from collections.abc import Callable
from typing import Any

import jax
import lineax as lx
from jaxtyping import PyTree

from natgrad._check import public
from natgrad._solve.direct import PseudoInverse
from natgrad._solve.solve import raise_failure, solve
from natgrad._vector import Covector, Vector, untyped


@public
def reparametrise(model: Callable, chart: Callable[[PyTree], PyTree]) -> Callable:
    r"""The model in other coordinates: `model(chart(theta), x)` as a function of `theta` and `x`.

    The metric at `theta` is $C^\top G\,C$, where $C$ is the Jacobian of the chart and $G$ the metric at `chart(theta)`,
    so natural gradients in both coordinates push forward to the same change of the outputs.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    model = ng.reparametrise(lambda w, x: x @ w, jnp.exp)  # positive weights
    ```
    """

    def reparametrised(theta: PyTree, *x: PyTree) -> PyTree:
        return model(chart(theta), *x)

    return reparametrised


@public
def flat(metric: lx.AbstractLinearOperator, vector: Vector | PyTree) -> Covector:
    r"""The covector $G v$ of a vector $v$: `metric` is $G$, and `vector` a `Vector` or a tree like the parameters.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.DiagonalMetric(jnp.array([1.0, 4.0]))
    assert jnp.allclose(ng.flat(metric, jnp.ones(2)).tree, jnp.array([1.0, 4.0]))
    ```
    """
    return Covector(metric.mv(untyped(vector, Vector)[0]))


@public
def sharp(
    metric: lx.AbstractLinearOperator,
    covector: Covector | PyTree,
    *,
    damping: Any = 0.0,
    solver: lx.AbstractLinearSolver | None = None,
) -> Vector:
    r"""The vector $G^+ c$ of a covector $c$: the direction in which a cost with gradient $c$ rises fastest.

    **Arguments:**

    - `metric`: $G$.
    - `covector`: $c$, a `Covector` or a tree like the parameters, such as a gradient.
    - `damping`: $\lambda$ in $(G + \lambda I)^{-1}c$, by default 0.
    - `solver`: by default `PseudoInverse()`. Then `sharp(G, flat(G, v))` is $G^+ G\,v$, the projection of $v$ onto the
      directions in which the metric is not zero.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    metric = ng.pullback(lambda w: 2 * w, ng.Euclidean(), jnp.ones(3))
    ng.sharp(metric, jnp.ones(3)).tree  # 1/4 in every entry
    ```
    """
    tree, _ = untyped(covector, Covector)
    solver = PseudoInverse() if solver is None else solver
    return Vector(raise_failure(solve(metric, tree, damping=damping, solver=solver)))


@public
def pushforward(f: Callable[[PyTree], PyTree], w: PyTree, v: Vector | PyTree) -> Vector:
    r"""The vector $\partial f(w)\,v$ at $f(w)$: the change of the output by a small step $v$ at $w$.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    moved = ng.pushforward(lambda w: w**2, jnp.array([1.0, 3.0]), jnp.array([1.0, 0.5]))
    assert jnp.allclose(moved.tree, jnp.array([2.0, 3.0]))
    ```
    """
    return Vector(jax.jvp(f, (w,), (untyped(v, Vector)[0],))[1])


@public
def pullback_covector(f: Callable[[PyTree], PyTree], w: PyTree, c: Covector | PyTree) -> Covector:
    r"""The covector $\partial f(w)^\top c$ at $w$ of a covector $c$ at $f(w)$: the chain rule.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    slope = ng.pullback_covector(lambda w: w**2, jnp.array([1.0, 3.0]), jnp.ones(2))
    assert jnp.allclose(slope.tree, jnp.array([2.0, 6.0]))
    ```
    """
    return Covector(jax.vjp(f, w)[1](untyped(c, Covector)[0])[0])
