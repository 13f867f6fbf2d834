"""The laws for users' classes: what is right passes, and every law can fail."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAMILIES, GEOMETRIES
from models import MODELS

import natgrad as ng
from natgrad import testing


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", GEOMETRIES)
def test_geometries_pass(name):
    geometry, z, *_ = GEOMETRIES[name]()
    testing.check(geometry, z)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_pass(name):
    case = FAMILIES[name]()
    testing.check(case.family, case.eta)


METRICS = {
    "pullback": lambda case: ng.pullback(case.model, case.geometry, case.params, case.x),
    "sum": lambda case: METRICS["pullback"](case) + 0.5 * ng.identity(case.params),
    "kfac": lambda case: ng.kfac(case.model, case.geometry, case.params, case.x),
    "diagonal": lambda case: ng.diagonal(case.model, case.geometry, case.params, case.x),
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", METRICS)
def test_metrics_pass(name):
    testing.check(METRICS[name](MODELS["mlp"]() if "mlp" in MODELS else next(iter(MODELS.values()))()))


PARTS = {
    "ekfac": ng.EKFAC,
    "exact": ng.Exact,
    "levenberg_marquardt": ng.LevenbergMarquardt,
    "quadratic_model": ng.QuadraticModel,
    "heavy_ball": ng.HeavyBall,
    "rollback": ng.Rollback,
    "no_guard": ng.NoGuard,
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", PARTS)
def test_parts_pass(name):
    laws = testing.check(PARTS[name]())
    assert len(laws) == 4


class Distance(ng.AbstractGeometry):
    """Euclidean geometry, with a mistake to choose."""

    mistake: str = eqx.field(default="", static=True)

    def _off(self, name):
        return 1.1 if self.mistake == name else 1.0

    def _dissimilarity(self, z, z0):
        shift = {"least": 1.0, "gradient": jnp.sum(z - z0)}.get(self.mistake, 0.0)
        return self._off("hessian") * jnp.sum((z - z0) ** 2) / 2 + shift

    def _metric_mv(self, z, v):
        return v + 0.1 * jnp.roll(v, 1) if self.mistake == "symmetric" else v

    def _factor(self, z):
        return self._off("factor") * jnp.eye(z.size, dtype=z.dtype)

    def _sample(self, z, key):
        return self._off("covariance") * jax.random.normal(key, z.shape, z.dtype) + float(self.mistake == "mean")


MISTAKES = {
    "least": "the dissimilarity of an output from itself is zero",
    "gradient": "the dissimilarity is stationary where outputs agree",
    "hessian": "the metric is the Hessian of the dissimilarity",
    "symmetric": "the metric is symmetric",
    "factor": "columns of `factor` multiply to the metric",
    "mean": "`sample` has mean zero",
    "covariance": "`sample` has the metric for its covariance",
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_geometry_with_a_mistake_breaks_its_law(mistake):
    z = np.array([0.3, -1.0, 2.0])
    testing.check(Distance(), z)
    with pytest.raises(AssertionError, match=r"`Distance` breaks \d+ of 10 laws:\n(.|\n)*" + MISTAKES[mistake]):
        testing.check(Distance(mistake), z)


class Faint(ng.AbstractGeometry):
    """A geometry of small numbers, which do not agree."""

    def _dissimilarity(self, z, z0):
        return 0.5e-7 * jnp.sum((z - z0) ** 2)

    def _metric_mv(self, z, v):
        return 3e-7 * v

    def _factor(self, z):
        return 5e-7**0.5 * jnp.eye(z.size, dtype=z.dtype)

    def _sample(self, z, key):
        return 3e-7**0.5 * jax.random.normal(key, z.shape, z.dtype)


def test_small_numbers_are_compared_too():
    with pytest.raises(AssertionError, match="`Faint` breaks 2 of 10 laws"):
        testing.check(Faint(), np.array([0.3, -1.0]))


class Rayleigh(ng.AbstractFamily):
    """The family of the guide, with a mistake to choose."""

    mistake: str = eqx.field(default="", static=True)

    @property
    def _event_shapes(self):
        return ((),)

    def _log_partition(self, eta):
        return -jnp.sum(jnp.log(-2 * eta))

    def _statistics(self, x):
        return x**2 * (1.1 if self.mistake == "statistics" else 1.0)

    def _draw(self, eta, key):
        return jnp.sqrt(-jnp.log(jax.random.uniform(key, eta.shape, eta.dtype)) / -eta)

    def _log_base_measure(self, x):
        return jnp.sum(jnp.log(x))

    def _mean_log_base_measure(self, eta):
        mean = (-jnp.log(-eta) - np.euler_gamma) / 2
        return jnp.sum(mean) + (0.3 if self.mistake == "entropy" else 0.0)

    def _to_natural(self, xi):
        return -1 / xi * (1.1 if self.mistake == "natural" else 1.0)

    def _natural_domain(self, eta):
        return [ng.Requirement(jnp.all(eta < 0), "negative numbers", "Negate it.")]

    def _moment_domain(self, xi):
        return [ng.Requirement(jnp.all(xi > 0), "positive numbers", "A mean of squares is positive.")]

    def _support(self, x):
        return [ng.Requirement(jnp.all(x > 0), "positive numbers", "A length is positive.")]


FAMILY_MISTAKES = {
    "statistics": "statistics of samples average to the moments",
    "entropy": "averages to the entropy",
    "natural": "`to_natural` inverts `to_moments`",
}


@pytest.mark.parametrize("mistake", FAMILY_MISTAKES)
def test_a_family_with_a_mistake_breaks_its_law(mistake):
    with pytest.raises(AssertionError, match=FAMILY_MISTAKES[mistake]):
        testing.check(Rayleigh(mistake), np.array(-0.7))


def test_a_family_without_a_mistake_passes():
    testing.check(Rayleigh(), np.array(-0.7))


class Chain(ng.AbstractMetric):
    """Squared differences of neighbours, with a mistake to choose."""

    mistake: str = eqx.field(default="", static=True)

    def _mv(self, v):
        product = self.root_transpose_mv(jnp.diff(v))
        return {"linear": product + 1.0, "symmetric": product + jnp.roll(v, 1), "sign": -product}.get(
            self.mistake, product
        )

    @property
    def root_size(self):
        return 3

    def root_mv(self, v):
        return jnp.diff(v) * (1.1 if self.mistake == "root" else 1.0)

    def root_transpose_mv(self, u):
        return jnp.pad(u, (1, 0)) - jnp.pad(u, (0, 1))

    def diagonal(self):
        entries = jnp.array([1.0, 2.0, 2.0, 1.0])
        return entries[::-1] + 1 if self.mistake == "diagonal" else entries

    def in_structure(self):
        return jax.ShapeDtypeStruct((4,), jnp.result_type(float))


METRIC_MISTAKES = {
    "linear": "products are linear",
    "symmetric": "the metric is symmetric",
    "sign": "the metric is positive semidefinite",
    "root": "`root_mv` multiplies by the root",
    "diagonal": "`diagonal` is the diagonal of the matrix",
}


@pytest.mark.parametrize("mistake", METRIC_MISTAKES)
def test_a_metric_with_a_mistake_breaks_its_law(mistake):
    with pytest.raises(AssertionError, match=METRIC_MISTAKES[mistake]):
        testing.check(Chain(mistake))


class Uphill(ng.AbstractStep):
    """A step rule that goes the wrong way."""

    def propose(self, expansion, search):
        return ng.Proposal(-0.1 * search.natural, 0.1, 0.0)

    @property
    def keeps_damping(self):
        return True


def test_a_step_rule_that_goes_uphill_is_found_out():
    with pytest.raises(AssertionError, match=r"(?s)`Uphill` breaks 1 of 4 laws.*the loss of a small regression falls"):
        testing.check(Uphill())


def test_what_is_asked_for():
    with pytest.raises(TypeError, match="`check` knows no laws of `int`"):
        testing.check(3)
    with pytest.raises(TypeError, match="`check` needs a second argument here: an output"):
        testing.check(ng.Euclidean())
