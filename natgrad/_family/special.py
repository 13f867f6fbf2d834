r"""Divergences, and gamma functions split into a large elementary part and a small remainder.

$\log\Gamma(x) = (x - \frac12)\log x - x + \frac12\log 2\pi + s(x)$ with $s(x) \approx 1/12x$. Differences of
log-gamma and digamma functions at large arguments, as in the beta and Dirichlet families, cancel in the elementary
part, where that can be done by hand, instead of in the digits. The parts are convex, so divergences become sums of
non-negative terms."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# s(x) as a series in 1/x, with coefficients B_2k / (2k (2k - 1)): exact to rounding in float64 from LARGE on.
SERIES = (1 / 12, -1 / 360, 1 / 1260, -1 / 1680, 1 / 1188, -691 / 360360, 1 / 156, -3617 / 122400, 43867 / 244188)
LARGE = 8


def measure_kl(
    p: Float[Array, "*shape"], q: Float[Array, "*shape"], log_ratio: Float[Array, "*shape"]
) -> Float[Array, "*shape"]:
    r"""$q - p - p\log(q/p) \ge 0$, the divergence of masses that need not sum to one; `log_ratio` is $\log(q/p)$."""
    # Close to p, the three terms nearly cancel, and `expm1` keeps the digits of what remains. Far from p, it would
    # overflow, and its NaN spoil the derivatives of the other branch: hence zero there.
    near = jnp.abs(log_ratio) < 1
    u = jnp.where(near, log_ratio, 0.0)
    return jnp.where(near, p * (jnp.expm1(u) - u), q - p - p * log_ratio)


def log_divergence(x: Float[Array, "*shape"], y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""The Bregman divergence $y/x - 1 - \log(y/x)$ of $-\log$, from $x$ to $y$."""
    return measure_kl(jnp.ones_like(x), y / x, jnp.log(y / x))


def stirling(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""The elementary part of $\log\Gamma$."""
    return (x - 0.5) * jnp.log(x) - x + 0.5 * math.log(2 * math.pi)


def stirling_remainder(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""$s(x)$; below `LARGE` by the recurrence $\Gamma(x + n) = x(x+1)\cdots(x+n-1)\,\Gamma(x)$."""
    is_large, small, shifted, factors = _shift(x)
    inverse = 1 / shifted
    series = horner(SERIES, inverse**2) * inverse
    recurrence = stirling(shifted) - stirling(small) - jnp.sum(jnp.log(factors), axis=-1)
    return jnp.where(is_large, series, series + recurrence)


def _shift(x: Array) -> tuple[Array, Array, Array, Array]:
    """Where `x` is large; `x` where it is not; an argument that is; and the factors in between."""
    is_large = x >= LARGE
    # One where it is not used, so that logarithms and divisions there stay finite, and their derivatives too.
    small = jnp.where(is_large, 1.0, x)
    return is_large, small, jnp.where(is_large, x, small + LARGE), _factors(small)


def _factors(x: Array) -> Array:
    """The factors of $x(x+1)\\cdots(x+n-1)$ along a new last axis."""
    return x[..., None] + jnp.arange(LARGE, dtype=x.dtype).reshape((1,) * x.ndim + (-1,))


def horner(coefficients, x: Array) -> Array:
    value = jnp.zeros_like(x)
    for coefficient in reversed(coefficients):
        value = value * x + coefficient
    return value


def log_gamma(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    return stirling(x) + stirling_remainder(x)


def digamma_remainder(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""$\psi(x) - \log x = s'(x) - 1/2x$."""
    is_large, small, shifted, factors = _shift(x)
    inverse = 1 / shifted
    slopes = [-(2 * k + 1) * coefficient for k, coefficient in enumerate(SERIES)]
    series = horner(slopes, inverse**2) * inverse**2 - inverse / 2
    recurrence = jnp.log(shifted / small) - jnp.sum(1 / factors, axis=-1)
    return jnp.where(is_large, series, series + recurrence)


def remainder_divergence(x: Float[Array, "*shape"], y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""The Bregman divergence $s(y) - s(x) - s'(x)(y - x)$ of the remainder, which is convex.

    Below `LARGE` by the recurrence again, term by term: for neighbouring arguments the difference above would be lost
    to rounding."""
    are_large = (x >= LARGE) & (y >= LARGE)
    moved_x, moved_y = (jnp.where(are_large, value, value + LARGE) for value in (x, y))
    slope = digamma_remainder(moved_x) + 0.5 / moved_x
    series = stirling_remainder(moved_y) - stirling_remainder(moved_x) - slope * (moved_y - moved_x)
    factors = jnp.sum(log_divergence(_factors(x), _factors(y)), axis=-1)
    recurrence = factors + stirling_divergence(moved_x, moved_y) - stirling_divergence(x, y)
    return jnp.where(are_large, series, series + recurrence)


def stirling_divergence(x: Float[Array, "*shape"], y: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    r"""The Bregman divergence of the elementary part of $\log\Gamma$."""
    return measure_kl(y, x, jnp.log(x / y)) + log_divergence(x, y) / 2


def log_shares(alpha: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    r"""$\log(\alpha_k / \sum_j\alpha_j)$, accurate also where one entry is nearly the whole sum."""
    zero = jnp.zeros_like(alpha[..., :1])
    before = jnp.cumsum(jnp.concatenate([zero, alpha[..., :-1]], axis=-1), axis=-1)
    after = jnp.flip(jnp.cumsum(jnp.flip(jnp.concatenate([alpha[..., 1:], zero], axis=-1), -1), axis=-1), -1)
    return -jnp.log1p((before + after) / alpha)


def log_beta(alpha: Float[Array, "*lead K"]) -> Float[Array, "*lead"]:
    r"""$\sum_k\log\Gamma(\alpha_k) - \log\Gamma(\sum_k\alpha_k)$, the logarithm of the multivariate beta function."""
    return jnp.sum(alpha * log_shares(alpha), axis=-1) + small_log_beta(alpha)


def small_log_beta(alpha: Float[Array, "*lead K"]) -> Float[Array, "*lead"]:
    r"""`log_beta` without its large part $\sum_k\alpha_k\log(\alpha_k / \sum_j\alpha_j)$."""
    total = jnp.sum(alpha, axis=-1)
    middle = (jnp.log(total) - jnp.sum(jnp.log(alpha), axis=-1)) / 2
    small = jnp.sum(stirling_remainder(alpha), axis=-1) - stirling_remainder(total)
    return middle + small + (alpha.shape[-1] - 1) * 0.5 * math.log(2 * math.pi)


def dirichlet_entropy(alpha: Float[Array, "*lead K"]) -> Float[Array, "*lead"]:
    r"""$\log B(\alpha) - \sum_k(\alpha_k - 1)\,\mathbb{E}\log x_k$, where the large part drops out."""
    total = jnp.sum(alpha, axis=-1)
    pairing = jnp.sum(alpha * digamma_remainder(alpha), axis=-1) - total * digamma_remainder(total)
    return small_log_beta(alpha) - pairing + jnp.sum(mean_logs(alpha), axis=-1)


def dirichlet_kl(alpha1: Float[Array, "*lead K"], alpha2: Float[Array, "*lead K"]) -> Float[Array, "*lead"]:
    r"""The large part is $\sum_k\alpha_{2k}$ times the divergence between the mean probabilities."""
    total1, total2 = jnp.sum(alpha1, axis=-1, keepdims=True), jnp.sum(alpha2, axis=-1, keepdims=True)
    moved = alpha1 * (total2 / total1)
    large = measure_kl(alpha2, moved, jnp.log(moved / alpha2))

    def small(x, y):
        return jnp.sum(log_divergence(x, y) / 2 + remainder_divergence(x, y), axis=-1)

    return jnp.sum(large, axis=-1) + small(alpha1, alpha2) - small(total1, total2)


def mean_logs(alpha: Float[Array, "*lead K"]) -> Float[Array, "*lead K"]:
    r"""$\psi(\alpha_k) - \psi(\sum_j\alpha_j)$: the mean of $\log x_k$ under a Dirichlet distribution."""
    total = jnp.sum(alpha, axis=-1, keepdims=True)
    return log_shares(alpha) + digamma_remainder(alpha) - digamma_remainder(total)


def alpha_guess(mean_log: Float[Array, " K"]) -> Float[Array, " K"]:
    r"""Parameters with roughly the given mean logs: from $\sum_k e^{\mathbb{E}\log x_k} \approx
    1 - \frac{K-1}{2\sum\alpha}$ where they are large and $\psi(\alpha) \approx -1/\alpha$ where they are small."""
    log_total = jax.nn.logsumexp(mean_log)
    concentration = (mean_log.shape[-1] - 1) / (-2 * jnp.expm1(log_total))
    return jnp.maximum(concentration * jnp.exp(mean_log - log_total), 1 / (1 - mean_log))
