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
    r"""The same model in other coordinates: `model(chart(theta), x)` as a function of `theta` and `x`.

    Its pullback metric at `theta` is that of the model pulled back through the chart, so natural gradients of the
    two push forward to the same change of the outputs."""

    def reparametrised(theta: PyTree, *x: PyTree) -> PyTree:
        return model(chart(theta), *x)

    return reparametrised


@public
def flat(metric: lx.AbstractLinearOperator, vector: Vector | PyTree) -> Covector:
    r"""The covector $G v$ of a vector."""
    return Covector(metric.mv(untyped(vector, Vector)[0]))


@public
def sharp(
    metric: lx.AbstractLinearOperator,
    covector: Covector | PyTree,
    *,
    damping: Any = 0.0,
    solver: lx.AbstractLinearSolver | None = None,
) -> Vector:
    r"""The vector $G^+ c$ of a covector: the direction in which a cost with gradient $c$ rises fastest.

    By default the pseudo-inverse, so that `sharp(G, flat(G, v))` is $G^+ G\,v$, the part of $v$ that the metric can
    see: all of it where the metric is not singular."""
    tree, _ = untyped(covector, Covector)
    solver = PseudoInverse() if solver is None else solver
    return Vector(raise_failure(solve(metric, tree, damping=damping, solver=solver)))


@public
def pushforward(f: Callable[[PyTree], PyTree], w: PyTree, v: Vector | PyTree) -> Vector:
    r"""The vector $\partial f(w)\,v$ at $f(w)$: where a step $v$ at $w$ takes the output."""
    return Vector(jax.jvp(f, (w,), (untyped(v, Vector)[0],))[1])


@public
def pullback_covector(f: Callable[[PyTree], PyTree], w: PyTree, c: Covector | PyTree) -> Covector:
    r"""The covector $\partial f(w)^\top c$ at $w$ of a covector $c$ at $f(w)$: the chain rule."""
    return Covector(jax.vjp(f, w)[1](untyped(c, Covector)[0])[0])
