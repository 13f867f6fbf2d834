"""The registries that laws are tested over, and the comparisons they are tested with."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
from jax.flatten_util import ravel_pytree

import natgrad as ng


class FamilyCase(NamedTuple):
    """A family and two of its members. Built by a function, so that arrays get the dtype of the test."""

    family: Any
    eta: Any
    other: Any
    # Directions of `eta` that change the distribution: all of them, all but constants, or symmetric ones.
    directions: str = "all"


def spd(*rows) -> jax.Array:
    root = np.array(rows)
    return jnp.asarray(root @ root.T + np.eye(len(rows)), jnp.result_type(float))


def gaussian(family=ng.Gaussian):
    eta = (jnp.array([0.5, -1.0]), spd([1.0, 0.2], [0.0, 0.5]))
    other = (jnp.array([-0.3, 0.4]), spd([0.3, -0.2], [0.4, 1.0]))
    return FamilyCase(family(2), eta, other, "symmetric")


FAMILIES: dict[str, Callable[[], FamilyCase]] = {
    "bernoullis": lambda: FamilyCase(
        ng.Bernoulli(), jnp.array([[0.7, -2.0], [0.1, 3.0]]), jnp.array([[1.0, 0.3], [-0.2, 0.0]])
    ),
    "categoricals": lambda: FamilyCase(
        ng.Categorical(3),
        jnp.array([[0.5, -1.0, 2.0], [0.1, 0.2, 0.3]]),
        jnp.array([[0.0, 1.0, 0.3], [-1.0, 1.0, 0.0]]),
        "centred",
    ),
    "minimal_categorical": lambda: FamilyCase(ng.MinimalCategorical(3), jnp.array([0.5, -1.0]), jnp.array([0.0, 1.0])),
    "gaussian_mean_number": lambda: FamilyCase(ng.GaussianMean(0.7), jnp.array([[0.5, -1.0]]), jnp.array([[0.1, 2.0]])),
    "gaussian_mean_matrix": lambda: FamilyCase(
        ng.GaussianMean(spd([1.0, 0.2], [0.0, 0.5])), jnp.array([0.5, -1.0]), jnp.array([0.1, 2.0])
    ),
    "gaussian_precision": lambda: FamilyCase(
        ng.GaussianPrecision(), spd([1.0, 0.2], [0.0, 0.5]), spd([0.3, -0.2], [0.4, 1.0]), "symmetric"
    ),
    "gaussian": gaussian,
    "diagonal_gaussian": lambda: FamilyCase(
        ng.Gaussian(1),
        (jnp.array([[0.5], [-1.0]]), jnp.array([[[2.0]], [[0.5]]])),
        (jnp.array([[0.1], [1.0]]), jnp.array([[[1.0]], [[0.7]]])),
    ),
    "poisson": lambda: FamilyCase(ng.Poisson(), jnp.array([0.7, -1.0]), jnp.array([1.2, -0.3])),
    "exponential": lambda: FamilyCase(ng.Exponential(), jnp.array([-0.7, -3.0]), jnp.array([-1.0, -2.0])),
    "gammas": lambda: FamilyCase(
        ng.Gamma(), jnp.array([[1.7, -0.6], [0.9, -2.0]]), jnp.array([[3.0, -1.1], [1.0, -1.0]])
    ),
    "beta": lambda: FamilyCase(ng.Beta(), jnp.array([1.3, 2.4]), jnp.array([2.0, 2.0])),
    "dirichlet": lambda: FamilyCase(ng.Dirichlet(), jnp.array([1.3, 2.4, 0.8]), jnp.array([2.0, 2.0, 14.0])),
    "geometric": lambda: FamilyCase(ng.Geometric(), jnp.array([-0.7, -2.0]), jnp.array([-1.0, -0.4])),
    "negative_binomial": lambda: FamilyCase(ng.NegativeBinomial(2.5), jnp.array([-0.7, -2.0]), jnp.array([-1.0, -0.4])),
    "product": lambda: FamilyCase(
        ng.Product({"clicks": ng.Bernoulli(), "place": ng.Gaussian(1)}),
        {"clicks": jnp.array([0.3, -0.5]), "place": (jnp.array([0.5]), jnp.array([[2.0]]))},
        {"clicks": jnp.array([1.0, 0.1]), "place": (jnp.array([-0.5]), jnp.array([[1.0]]))},
    ),
}


class GeometryCase(NamedTuple):
    """A geometry, two outputs of one example, and how many columns an exact factor needs at most."""

    geometry: Any
    z: Any
    other: Any
    columns: int


def fisher_case(name: str, columns: int) -> Callable[[], GeometryCase]:
    def build() -> GeometryCase:
        family, eta, other, _ = FAMILIES[name]()
        return GeometryCase(ng.Fisher(family), eta, other, columns)

    return build


def log_sum_exp_and_square(z):
    return jax.nn.logsumexp(z["logits"]) + jnp.sum(z["value"] ** 4)


def wobbly_distance(z, z0):
    """Not symmetric, not a Bregman divergence, with a metric that depends on the place."""
    step = z - z0
    return jnp.sum((1 + z0**2) * step**2 + step**3 / 10) / 2 + (step[0] * step[1]) ** 2 / 2


TREE = lambda: {"logits": jnp.array([0.5, -1.0, 2.0]), "value": jnp.array(0.7)}
OTHER_TREE = lambda: {"logits": jnp.array([0.1, 0.3, 1.0]), "value": jnp.array(-0.2)}

GEOMETRIES: dict[str, Callable[[], GeometryCase]] = {
    "euclidean": lambda: GeometryCase(ng.Euclidean(), jnp.array([[0.5, -1.0], [2.0, 0.1]]), jnp.ones((2, 2)), 4),
    "euclidean_number": lambda: GeometryCase(ng.Euclidean(), jnp.array(0.5), jnp.array(1.5), 1),
    "euclidean_tree": lambda: GeometryCase(ng.Euclidean(), TREE(), OTHER_TREE(), 4),
    "bernoullis": fisher_case("bernoullis", 4),
    "categoricals": fisher_case("categoricals", 6),
    "minimal_categorical": fisher_case("minimal_categorical", 2),
    "gaussian_mean_number": fisher_case("gaussian_mean_number", 2),
    "gaussian_mean_matrix": fisher_case("gaussian_mean_matrix", 2),
    "gaussian_precision": fisher_case("gaussian_precision", 3),
    "gaussian": fisher_case("gaussian", 5),
    "diagonal_gaussian": fisher_case("diagonal_gaussian", 4),
    "poisson": fisher_case("poisson", 2),
    "exponential": fisher_case("exponential", 2),
    "gammas": fisher_case("gammas", 4),
    "beta": fisher_case("beta", 2),
    "dirichlet": fisher_case("dirichlet", 3),
    "geometric": fisher_case("geometric", 2),
    "negative_binomial": fisher_case("negative_binomial", 2),
    "product_family": fisher_case("product", 4),
    "dual_poisson": lambda: GeometryCase(ng.DualFisher(ng.Poisson()), jnp.array([0.7, 2.0]), jnp.array([1.2, 0.5]), 2),
    "dual_gaussian": lambda: GeometryCase(
        ng.DualFisher(ng.Gaussian(1)),
        (jnp.array([0.5]), jnp.array([[-0.6]])),
        (jnp.array([0.1]), jnp.array([[-1.0]])),
        2,
    ),
    "softplus_rate": lambda: GeometryCase(
        ng.Fisher(ng.Poisson(), chart=lambda z: jnp.log(jax.nn.softplus(z))),
        jnp.array([0.3, -1.0]),
        jnp.array([1.0, 0.5]),
        2,
    ),
    "bregman": lambda: GeometryCase(ng.Bregman(log_sum_exp_and_square), TREE(), OTHER_TREE(), 4),
    "dissimilarity": lambda: GeometryCase(
        ng.Dissimilarity(wobbly_distance), jnp.array([0.5, -1.0]), jnp.array([0.4, -1.2]), 2
    ),
    "scaled": lambda: GeometryCase(
        2.5 * ng.Fisher(ng.Categorical()), jnp.array([0.5, -1.0, 2.0]), jnp.array([0.0, 1.0, 0.3]), 3
    ),
    "heads": lambda: GeometryCase(
        ng.ProductGeometry({"logits": ng.Fisher(ng.Categorical()), "value": 0.1 * ng.Euclidean()}),
        TREE(),
        OTHER_TREE(),
        4,
    ),
}


def ravel(tree) -> jax.Array:
    return ravel_pytree(tree)[0]


def flat(tree) -> np.ndarray:
    """The leaves in one vector, by NumPy: nothing is compiled."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


def columns(factor) -> np.ndarray:
    """The columns of a factor as a matrix with one row a column."""
    return np.concatenate([np.asarray(leaf).reshape(len(leaf), -1) for leaf in jax.tree.leaves(factor)], axis=1)


def assert_close(actual, expected, rtol=1e-10, atol=1e-12) -> None:
    """Trees agree in structure and, leaf by leaf, in shape and value."""
    jax.tree.map(lambda a, b: np.testing.assert_equal(jnp.shape(a), jnp.shape(b)), actual, expected)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), actual, expected)


def assert_mean(draws, expected, standard_errors: float = 5.0, slack: float = 1e-12) -> None:
    """The mean of `draws` over the leading axis is `expected`, within a number of its own standard errors."""
    draws, expected = np.asarray(draws), np.asarray(expected)
    error = draws.std(axis=0, ddof=1) / np.sqrt(len(draws))
    np.testing.assert_array_less(np.abs(draws.mean(axis=0) - expected), standard_errors * error + slack)


def projection(case: FamilyCase) -> np.ndarray:
    """The orthogonal projection onto directions of the flattened parameters that change the distribution."""
    size = flat(case.eta).size
    if case.directions == "all":
        return np.eye(size)
    if case.directions == "centred":
        classes = case.eta.shape[-1]
        return np.kron(np.eye(size // classes), np.eye(classes) - 1 / classes)
    parts = [
        symmetric_part(leaf.shape[-1]) if leaf.ndim == 2 else np.eye(leaf.size) for leaf in jax.tree.leaves(case.eta)
    ]
    return scipy.linalg.block_diag(*parts)


def symmetric_part(size: int) -> np.ndarray:
    """The projection of flattened square matrices onto symmetric ones."""
    swap = np.eye(size**2).reshape(size, size, size, size).swapaxes(0, 1).reshape(size**2, size**2)
    return (np.eye(size**2) + swap) / 2


@eqx.filter_jit
def _step(opt, params, state, batch, key):
    return opt.step(params, state, batch, key)


def compiled_step(opt: ng.NaturalGradient) -> Callable:
    """`opt.step`, compiled once for all optimisers that differ in numbers only and for all batches of a shape."""
    return lambda params, state, batch, key=None: _step(opt, params, state, batch, key)


def one_step(opt: ng.NaturalGradient, params, batch, key=None):
    """The first step of an optimiser."""
    return compiled_step(opt)(params, opt.init(params, batch), batch, key)


def output_on_two_devices(program: str, seconds: float) -> str:
    """What a program prints on two virtual devices; `hangs` if it does not end in time."""
    header = "import os\nos.environ['XLA_FLAGS'] = '--xla_force_host_platform_device_count=2'\n"
    try:
        done = subprocess.run(
            [sys.executable, "-c", header + program], capture_output=True, text=True, timeout=seconds, check=True
        )
    except subprocess.TimeoutExpired:
        return "hangs"
    return done.stdout.strip()
