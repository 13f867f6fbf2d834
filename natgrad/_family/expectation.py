"""The natural gradient of an expectation, as variational inference needs it."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from natgrad import _tree
from natgrad._check import caller, public
from natgrad._family.base import AbstractFamily
from natgrad._types import Estimate, Key, Moments, Natural, Observation, Scalar


@public
def expectation_gradient(
    family: AbstractFamily,
    function: Callable[[Observation], Scalar],
    eta: Natural,
    key: Key,
    *,
    num_samples: int = 100,
    pathwise: bool | None = None,
) -> Estimate:
    r"""The natural gradient $F^{-1}\nabla_\eta\,\mathbb{E}_{p_\eta}f(x)$ from samples, with its standard error.

    It is the ordinary gradient in the moments, so there is no Fisher matrix and nothing to solve.

    To lower $\mathbb{E}f$, follow it downhill in $\eta$. In variational inference $f = -\log p(x, \text{data})$; less
    the entropy, whose natural gradient is $-\eta$ (if the base measure is constant), a step is
    $\eta \leftarrow (1 - a)\,\eta - a\,g$: the conjugate update where there is one, for $a = 1$.

    **Arguments:**

    - `function`: $f$, of one observation.
    - `eta`: the natural parameters.
    - `num_samples`: how many samples to draw.
    - `pathwise`: whether to differentiate $f$ along samples that move with the moments, which has little variance and
      needs continuous observations and a smooth $f$; or to use the score, which needs neither:
      $\mathbb{E}[(f - \bar f)(t - \xi)]$, pulled to the moments. By default the first where the family allows it.

    ```python
    import jax
    import jax.numpy as jnp
    import natgrad as ng

    # The mean of x is the moment, so its gradient in the moments is one.
    slope = ng.expectation_gradient(ng.GaussianMean(1.0), lambda x: x, jnp.array(0.5), jax.random.key(0))
    assert jnp.allclose(slope.value, 1.0)
    ```
    """
    if not isinstance(num_samples, int) or num_samples < 2:
        raise ValueError(f"{caller()} needs `num_samples` of at least 2, but got {num_samples}.")
    if pathwise and not family.moves_samples:
        raise ValueError(
            f"{caller()} cannot move samples of `{type(family).__name__}`, which are discrete: a derivative along them "
            "would be zero. Leave `pathwise` out, or pass `False`."
        )
    eta = family._check_natural(eta)
    keys = jax.random.split(key, num_samples)
    is_pathwise = family.moves_samples if pathwise is None else pathwise
    gradients = (_along_samples if is_pathwise else _by_scores)(family, function, eta, keys)
    mean = jax.tree.map(lambda draws: jnp.mean(draws, axis=0), gradients)
    error = jax.tree.map(lambda draws: jnp.std(draws, axis=0, ddof=1) / num_samples**0.5, gradients)
    return Estimate(mean, error)


def _along_samples(family: AbstractFamily, function: Callable, eta: Natural, keys: Key) -> Natural:
    xi = family._to_moments(eta)

    def cost(xi: Moments, key: Key) -> Scalar:
        return function(family._draw(family._to_natural(xi), key))

    return jax.vmap(jax.grad(cost), (None, 0))(xi, keys)


def _by_scores(family: AbstractFamily, function: Callable, eta: Natural, keys: Key) -> Natural:
    xi, count = family._to_moments(eta), len(keys)
    _, pull = jax.vjp(family._to_natural, xi)
    xs = jax.vmap(family._draw, (None, 0))(eta, keys)
    values = jax.vmap(function)(xs)
    # Every value is compared with the mean of the others, so that the estimate has no bias.
    centred = (values - jnp.mean(values)) * count / (count - 1)

    def gradient(value: Scalar, x: Observation) -> Moments:
        score = _tree.subtract(family._statistics(x), xi)
        return pull(_tree.scale(value, score))[0]

    return jax.vmap(gradient)(centred, xs)
