"""From moments to natural parameters where there is no closed form."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array

from natgrad import _linalg
from natgrad._types import Matrix

MAX_STEPS = 100
# Where the Fisher matrix is nearly singular, Newton's step may be too long by many orders of magnitude; this allows
# for a trillion.
MAX_HALVINGS = 40


def natural_by_newton(family, xi: Array) -> Array:
    r"""Solve $\nabla\log Z(\eta) = \xi$ event by event, for a family whose events have one parameter axis.

    Raises (at run time under `jit`) if some event did not converge."""
    events = xi.reshape(-1, xi.shape[-1])
    eta, converged = _solve_all(family, events)
    eta = eqx.error_if(
        eta,
        ~converged,
        f"`{type(family).__name__}.to_natural` did not converge: the moments are too close to the boundary of the "
        "domain for this precision. Use float64, or average over more data.",
    )
    return eta.reshape(xi.shape)


# Compiled here, because outside `jit` a loop is traced and compiled at every call, which takes 1 s (JAX 0.10.1).
# Reproduced by `test_loops_outside_jit_are_traced_at_every_call`.
@eqx.filter_jit
def _solve_all(family, events: Array) -> tuple[Array, Array]:
    return jax.vmap(lambda event: _solve(family, event))(events)


@eqx.filter_custom_jvp
def _solve(family, xi: Array) -> tuple[Array, Array]:
    r"""Damped Newton on the convex $\log Z(\eta) - \langle\eta, \xi\rangle$ for one event.

    A step is halved until it stays in the domain and does not raise the objective, which makes the method
    converge from anywhere. The last step is the one that moves the distribution by a divergence (half of
    $\delta\eta^\top F\,\delta\eta$) below rounding; since convergence is quadratic, it lands on the solution."""
    rounding = jnp.finfo(xi.dtype).eps

    def objective(eta):
        inside = jnp.stack([jnp.all(requirement.holds) for requirement in family._natural_domain(eta)])
        value = family._log_partition(eta) - jnp.vdot(eta, xi)
        return jnp.where(jnp.all(inside), value, jnp.inf)

    def backtrack(eta, value, step):
        # Rounding of the two parts of the objective hides progress close to the solution: allow for it.
        pairing = eta * xi
        limit = value + 64 * rounding * (jnp.abs(value + jnp.sum(pairing)) + jnp.sum(jnp.abs(pairing)))

        def too_long(carry):
            _, new_value, halvings = carry
            return ~(new_value <= limit) & (halvings < MAX_HALVINGS)

        def halve(carry):
            size, _, halvings = carry
            return size / 2, objective(eta + size * step), halvings + 1

        whole = jnp.ones((), xi.dtype)
        size, value, _ = jax.lax.while_loop(too_long, halve, (whole, jnp.full_like(value, jnp.inf), 0))
        return eta + 2 * size * step, value

    def unfinished(carry):
        _, _, converged, count = carry
        return ~converged & (count < MAX_STEPS)

    def newton(carry):
        eta, value, _, count = carry
        moments, fisher = moments_and_fisher(family, eta)
        residual = moments - xi
        step = -_solve_with(fisher, residual)
        converged = jnp.abs(jnp.vdot(step, residual)) <= rounding
        return *backtrack(eta, value, step), converged, count + 1

    start = family._initial_natural(xi)
    eta, _, converged, _ = jax.lax.while_loop(unfinished, newton, (start, objective(start), jnp.array(False), 0))
    return eta, converged


@_solve.def_jvp
def _(primals, tangents):
    r"""Implicit differentiation: $d\eta = F^{-1}d\xi$."""
    family, xi = primals
    _, xi_dot = tangents
    eta, converged = _solve(family, xi)
    _, fisher = moments_and_fisher(family, eta)
    return (eta, converged), (_solve_with(fisher, xi_dot), None)


def _solve_with(fisher: Matrix, covector: Array) -> Array:
    return _linalg.cholesky_solve(_linalg.cholesky(fisher), covector[:, None])[:, 0]


def moments_and_fisher(family, eta: Array) -> tuple[Array, Array]:
    moments, slope = jax.linearize(family._to_moments, eta)
    return moments, jax.vmap(slope)(jnp.eye(eta.size, dtype=eta.dtype))
