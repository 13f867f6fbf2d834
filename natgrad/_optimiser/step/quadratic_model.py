import jax.numpy as jnp
from jaxtyping import Array, Float

from natgrad._optimiser.momentum import HeavyBall
from natgrad._optimiser.step.base import AbstractStep, Proposal, Quadratic


class QuadraticModel(AbstractStep):
    r"""Step size and momentum that minimise the quadratic model of the loss.

    The model is $g^\top\delta + \frac12\delta^\top(G + D)\,\delta$ over $\delta = \alpha d + \mu\delta'$, with the
    exact metric $G$ of the batch, for two tangent passes. Nothing is left to choose, if batches are large enough for
    the model to be the model of the whole problem; on small batches use `CrossValidated`.

    With `HeavyBall(decay)` of its own, momentum is given and only the step size is found.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    x = jnp.array([[1.0], [2.0]])
    w, batch = jnp.zeros((1, 1)), (x, 3 * x)
    opt = ng.NaturalGradient(
        lambda w, x: x @ w, ng.LeastSquares(), ng.Exact(), ng.ConstantDamping(0.5), step=ng.QuadraticModel()
    )
    w, state, info = jax.jit(opt.step)(w, opt.init(w, batch), batch)
    assert jnp.allclose(info.step_size, 1.0)  # the exact metric predicts its own step
    ```
    """

    def propose(self, expansion, search):
        if search.last is None:
            model = expansion.quadratic(search.natural)
            coefficients = -model.slope / _positive(model.damped[0])
        elif search.momentum is None:
            model = expansion.quadratic(search.natural, search.last)
            coefficients = _minimiser(model)
        else:
            model = expansion.quadratic(search.natural, search.last)
            given = jnp.asarray(search.momentum, model.slope.dtype)
            step = -(model.slope[0] + model.damped[0, 1] * given) / _positive(model.damped[0, 0])
            coefficients = jnp.stack([step, given])
        step_size = coefficients[0]
        momentum = coefficients[1] if len(coefficients) > 1 else 0.0
        return Proposal(
            search.update(step_size, momentum),
            step_size,
            momentum,
            predicted_decrease=model.decrease(coefficients),
            predicted_divergence=model.divergence(coefficients),
            cosine=model.cosine(coefficients),
        )

    @property
    def momentum(self):
        return HeavyBall(None)

    @property
    def finds_momentum(self):
        return True


def _positive(curvature: Array) -> Array:
    return jnp.where(curvature > 0, curvature, 1.0)


def _minimiser(model: Quadratic) -> Float[Array, "2"]:
    """Of the damped model. Vectors that are nearly parallel, as late in a run, share the step; and before there is a
    last update, its coefficient is zero."""
    squares = jnp.diagonal(model.damped)
    # The root has no derivative at zero, so that none is taken there.
    units = jnp.where(squares > 0, 1 / jnp.sqrt(_positive(squares)), 0.0)
    a, b = units[0] * units[1] * model.damped[0, 1], units * model.slope
    ridge = 10 * jnp.finfo(b.dtype).eps
    determinant = (1 + ridge) ** 2 - a**2
    both = -jnp.stack([(1 + ridge) * b[0] - a * b[1], (1 + ridge) * b[1] - a * b[0]]) / determinant
    alone = jnp.stack([-b[0], jnp.zeros_like(b[0])])
    return units * jnp.where(squares[1] > 0, both, alone)
