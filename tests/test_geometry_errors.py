"""What geometries refuse, and in which words."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import natgrad as ng

Z = np.array([0.5, -1.0])


def norm(z, z0):
    return jnp.sqrt(jnp.sum((z - z0) ** 2))


REFUSED = {
    "integers": (lambda: ng.Euclidean().factor(jnp.arange(3)), TypeError, r"`Euclidean.factor`: `z`.*floating.*astype"),
    "complex": (lambda: ng.Euclidean().factor(1j * Z), TypeError, "floating"),
    "text": (lambda: ng.Euclidean().factor("z"), TypeError, "array of real numbers"),
    "nothing": (lambda: ng.Euclidean().factor(()), ValueError, "no arrays"),
    "other_shape": (
        lambda: ng.Euclidean().dissimilarity(Z, Z[:1]),
        ValueError,
        r"`z0` must have the structure.*\(1,\).*jax.vmap",
    ),
    "other_structure": (lambda: ng.Euclidean().metric_mv({"a": Z}, Z), ValueError, r"`v` must have the structure"),
    "outside_the_family": (
        lambda: ng.Fisher(ng.Exponential()).metric_mv(np.array([1.0]), np.array([1.0])),
        ValueError,
        r"`Fisher.metric_mv`: natural parameter `z` of `Exponential` needs negative numbers",
    ),
    "outside_through_a_chart": (
        lambda: ng.Fisher(ng.Exponential(), chart=lambda z: z).sample(np.array([1.0]), jax.random.key(0)),
        ValueError,
        r"chart\(z\)",
    ),
    "not_finite": (lambda: ng.Fisher(ng.Categorical()).factor(np.array([np.nan, 0.0])), ValueError, "finite numbers"),
    "wrong_number_of_classes": (
        lambda: ng.Fisher(ng.Categorical(3)).factor(Z),
        ValueError,
        r"trailing shape \(..., 3\), but got \(2,\)",
    ),
    "slope_at_coincidence": (
        lambda: ng.Dissimilarity(lambda z, z0: jnp.sum(z - z0)).factor(Z),
        ValueError,
        r"`Dissimilarity.factor` needs `rho\(z, z0\)` to have zero gradient.*squared distance",
    ),
    "norm_without_square": (lambda: ng.Dissimilarity(norm).metric_matrix(Z), ValueError, "zero gradient"),
    "maximum_at_coincidence": (
        lambda: ng.Dissimilarity(lambda z, z0: -jnp.sum((z - z0) ** 2)).metric_mv(Z, Z),
        ValueError,
        r"minimum where `z = z0`.*sign",
    ),
    "concave": (
        lambda: ng.Bregman(lambda z: -jnp.sum(z**2)).factor(Z),
        ValueError,
        r"`Bregman.factor` needs `phi` to be convex",
    ),
    "negative_scale": (lambda: -1.0 * ng.Euclidean(), ValueError, "Scaling a geometry needs a positive number"),
    "vector_scale": (lambda: jnp.ones(2) * ng.Euclidean(), ValueError, r"one number, but got an array of shape \(2,\)"),
    "heads_of_something_else": (lambda: ng.ProductGeometry({"a": 1.0}), TypeError, "a geometry at every leaf"),
    "missing_head": (
        lambda: ng.ProductGeometry({"a": ng.Euclidean(), "b": ng.Euclidean()}).factor({"a": Z}),
        TypeError,
        "structure of `ProductGeometry.geometries`",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_reason(name):
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=words):
        call()


def test_products_check_nothing_under_jit():
    """They report through results instead: no callback is compiled into them."""
    geometry = ng.Fisher(ng.Exponential())
    text = str(jax.make_jaxpr(geometry.metric_mv)(Z, Z))
    assert "callback" not in text
    assert "callback" in str(jax.make_jaxpr(ng.Exponential().to_moments)(-np.ones(2)))


def test_an_indefinite_metric_never_passes_for_a_semidefinite_one_under_jit():
    geometry = ng.Bregman(lambda z: z[0] ** 2 - z[1] ** 2)
    assert np.isnan(jax.jit(geometry.factor)(jnp.ones(2))).any()
    assert np.isnan(jax.jit(geometry.sample)(jnp.ones(2), jax.random.key(0))).any()
