"""What families refuse, and in which words: the argument, what is wrong with it, and the remedy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import FAMILIES

import natgrad as ng
from natgrad._family.base import AbstractFamily

NAN = np.nan
ASYMMETRIC = np.array([[1.0, 0.5], [0.0, 1.0]])
INDEFINITE = np.array([[1.0, 2.0], [2.0, 1.0]])
NOT_CONVERGED = "`Beta.to_natural` did not converge.*boundary.*Use float64, or average over more data"
PAIR = lambda: ng.Product((ng.Bernoulli(), ng.Poisson()))


class Logistic(AbstractFamily):
    """A family that states no inverse of its moments, nor where to look for one."""

    @property
    def _event_shapes(self):
        return ((1,),)

    def _log_partition(self, eta):
        return jnp.sum(jax.nn.softplus(eta))

    def _statistics(self, x):
        return x[..., None]

    def _draw(self, eta, key):
        raise NotImplementedError

    def _natural_domain(self, eta):
        return []

    def _moment_domain(self, xi):
        return []

    def _support(self, x):
        return []


# Calls, the exception, and words in the order in which they must appear.
CONSTRUCTION = {
    "one_class": (lambda: ng.Categorical(1), ValueError, "`Categorical` .*2 classes.*`num_classes=1`"),
    "one_minimal_class": (
        lambda: ng.MinimalCategorical(1),
        ValueError,
        "`MinimalCategorical` .*2 classes.*`num_classes=1`",
    ),
    "no_dimension": (lambda: ng.Gaussian(0), ValueError, "`Gaussian` .*dimension.*`dim=0`"),
    "no_precision_dimension": (
        lambda: ng.GaussianPrecision(0),
        ValueError,
        "`GaussianPrecision` .*dimension.*`dim=0`",
    ),
    "text_covariance": (
        lambda: ng.GaussianMean("wide"),
        TypeError,
        "`GaussianMean`: `covariance`.*real numbers.*`str`.*Pass an array",
    ),
    "integer_covariance": (
        lambda: ng.GaussianMean(np.array(2)),
        TypeError,
        "`covariance`.*floating-point.*`int64`.*astype",
    ),
    "cubic_covariance": (
        lambda: ng.GaussianMean(np.ones((2, 2, 2))),
        ValueError,
        r"`covariance`.*number, a vector.*matrix.*\(2, 2, 2\)",
    ),
    "oblong_covariance": (lambda: ng.GaussianMean(np.ones((2, 3))), ValueError, r"square matrix.*\(2, 3\)"),
    "negative_variance": (
        lambda: ng.GaussianMean([1.0, -1.0]),
        ValueError,
        r"`covariance` needs positive variances.*-1.*not deviations",
    ),
    "infinite_variance": (lambda: ng.GaussianMean(np.inf), ValueError, "`covariance` needs finite.*inf"),
    "asymmetric_covariance": (
        lambda: ng.GaussianMean(ASYMMETRIC),
        ValueError,
        r"`covariance` needs it to be symmetric.*0\.5.*Symmetrise",
    ),
    "indefinite_covariance": (
        lambda: ng.GaussianMean(INDEFINITE),
        ValueError,
        "`covariance` needs it to be positive definite.*sign",
    ),
    "nan_covariance": (lambda: ng.GaussianMean(np.full((2, 2), NAN)), ValueError, "finite.*nan"),
    "no_successes": (
        lambda: ng.NegativeBinomial(0),
        ValueError,
        "`NegativeBinomial`: `count` needs a count above 0.*`0.0`.*successes",
    ),
    "many_counts": (lambda: ng.NegativeBinomial([1.0, 2.0]), ValueError, r"`count`.*one number.*\(2,\)"),
    "nan_count": (lambda: ng.NegativeBinomial(NAN), ValueError, "`count` needs finite"),
    "text_count": (lambda: ng.NegativeBinomial("two"), TypeError, "`count`.*real numbers.*`str`"),
    "number_in_product": (
        lambda: ng.Product((ng.Bernoulli(), 3)),
        TypeError,
        r"`Product` needs.*family at every leaf.*`\(Bernoulli\(\), Poisson\(\)\)`",
    ),
    "empty_product": (lambda: ng.Product({}), TypeError, "family at every leaf"),
}

NATURAL = {
    "integers": (
        lambda: ng.Bernoulli().log_partition(jnp.arange(3)),
        TypeError,
        "`Bernoulli.log_partition`: natural parameter `eta`.*floating-point.*`int64`.*astype",
    ),
    "complex": (
        lambda: ng.Bernoulli().to_moments(np.array(1j)),
        TypeError,
        "`Bernoulli.to_moments`.*`eta`.*floating-point.*`complex128`",
    ),
    "text": (lambda: ng.Bernoulli().entropy("even"), TypeError, "`eta`.*real numbers.*`str`.*Pass an array"),
    "text_array": (lambda: ng.Bernoulli().entropy(np.array("even")), TypeError, "`eta`.*floating-point.*U4"),
    "ragged": (lambda: ng.Categorical().fisher([[0.0, 1.0], [2.0]]), TypeError, "`eta`.*real numbers.*`list`"),
    "nan": (
        lambda: ng.Bernoulli().fisher([0.0, NAN]),
        ValueError,
        "`Bernoulli.fisher`.*`eta` needs finite numbers.*nan.*overflow",
    ),
    "infinite": (lambda: ng.Categorical().entropy([0.0, np.inf]), ValueError, "`eta` needs finite.*inf"),
    "none": (lambda: ng.Bernoulli().entropy(None), ValueError, "`eta` needs finite"),
    "number_of_classes": (
        lambda: ng.Categorical(3).entropy([0.0, 1.0]),
        ValueError,
        r"`eta` must have trailing shape \(..., 3\), but got \(2,\)",
    ),
    "number_of_minimal_classes": (
        lambda: ng.MinimalCategorical(3).entropy([0.0, 1.0, 2.0]),
        ValueError,
        r"trailing shape \(..., 2\), but got \(3,\)",
    ),
    "number_for_a_vector": (
        lambda: ng.Dirichlet().entropy(1.0),
        ValueError,
        r"trailing shape \(..., any above 0\), but got \(\)",
    ),
    "no_classes": (lambda: ng.Categorical().entropy(np.zeros((2, 0))), ValueError, r"any above 0.*\(2, 0\)"),
    "oblong_precision": (
        lambda: ng.GaussianPrecision().entropy(np.ones((2, 3))),
        ValueError,
        r"square matrices.*\(2, 3\).*not a triangle",
    ),
    "two_arrays_in_one": (
        lambda: ng.Gaussian(2).log_partition(np.ones((2, 2))),
        TypeError,
        "`eta` must be a tuple of 2 arrays, but got `ndarray`",
    ),
    "leading_axes": (
        lambda: ng.Gaussian(1).log_partition((np.zeros((2, 1)), np.eye(1))),
        ValueError,
        r"agree in their leading axes.*\(\), \(2,\)",
    ),
    "asymmetric": (
        lambda: ng.GaussianPrecision().entropy(ASYMMETRIC),
        ValueError,
        "needs the precision to be symmetric.*Symmetrise",
    ),
    "indefinite": (
        lambda: ng.Gaussian(2).entropy((np.zeros(2), INDEFINITE)),
        ValueError,
        r"needs the precision `eta\[1\]` to be positive definite.*multiple of the identity",
    ),
    "rate": (lambda: ng.Exponential().sample(0.5, jax.random.key(0)), ValueError, "negative.*`0.5`.*`-rate`"),
    "zero_rate": (lambda: ng.Exponential().entropy(0.0), ValueError, "negative numbers"),
    "shape": (lambda: ng.Gamma().entropy([-1.0, -1.0]), ValueError, r"shapes `eta\[..., 0\]` above 0.*-rate"),
    "gamma_rate": (lambda: ng.Gamma().entropy([1.0, 1.0]), ValueError, r"minus rates `eta\[..., 1\]` below 0"),
    "alpha": (lambda: ng.Beta().entropy([0.0, 1.0]), ValueError, "concentrations above 0.*not `alpha - 1`"),
    "alphas": (lambda: ng.Dirichlet().entropy([2.0, -1.0]), ValueError, "concentrations above 0"),
    "log_probability": (lambda: ng.Geometric().entropy(0.1), ValueError, r"negative.*Pass `log\(1 - p\)`"),
    "log_probability_of_many": (
        lambda: ng.NegativeBinomial(2).entropy(0.0),
        ValueError,
        r"`NegativeBinomial.entropy`.*negative.*Pass `log\(1 - p\)`",
    ),
    "overflowing_rate": (
        lambda: ng.Poisson().to_moments(800.0),
        ValueError,
        "log rates below 709.8.*overflows float64.*Divide the counts",
    ),
    "first_of_two": (lambda: ng.Exponential().kl(0.5, -1.0), ValueError, "`Exponential.kl`.*`eta1`"),
    "second_of_two": (lambda: ng.Exponential().kl(-1.0, 0.5), ValueError, "`Exponential.kl`.*`eta2`"),
    "two_shapes": (
        lambda: ng.Bernoulli().kl(np.zeros(2), np.zeros(3)),
        ValueError,
        r"`Bernoulli.kl`.*same shape.*\(2,\).*\(3,\)",
    ),
    "missing_part": (
        lambda: PAIR().entropy((0.0,)),
        TypeError,
        r"`Product.entropy`.*`eta`.*structure of `Product.families`, but.*1 != 2",
    ),
    "other_structure": (lambda: PAIR().entropy([0.0, 1.0]), TypeError, "`eta`.*structure of `Product.families`"),
    "part_outside": (lambda: PAIR().entropy((0.0, 800.0)), ValueError, "`Product.entropy`.*log rates below"),
    "from_mean": (
        lambda: ng.Gaussian(2).from_mean(np.zeros(2), INDEFINITE),
        ValueError,
        r"`Gaussian.from_mean`: `\(mean, covariance\)` needs the covariance to be positive definite",
    ),
    "from_infinite_mean": (
        lambda: ng.Gaussian(1).from_mean([np.inf], [[1.0]]),
        ValueError,
        "`Gaussian.from_mean`.*finite",
    ),
    "close_to_the_boundary": (
        lambda: ng.Bernoulli().natural_gradient(lambda eta: eta, 1e4),
        ValueError,
        "`Bernoulli.natural_gradient`.*so close to the boundary.*between 0 and 1",
    ),
}

MOMENTS = {
    "integers": (
        lambda: ng.Bernoulli().to_natural(np.array([0, 1])),
        TypeError,
        "`Bernoulli.to_natural`: moment `xi`.*floating-point",
    ),
    "nan": (lambda: ng.Poisson().to_natural(NAN), ValueError, "`Poisson.to_natural`: moment `xi`.*finite"),
    "bernoulli_zero": (
        lambda: ng.Bernoulli().to_natural([0.0, 0.5]),
        ValueError,
        r"between 0 and 1.*Smooth.*`\(k \+ 1\) / \(n \+ 2\)`",
    ),
    "bernoulli_one": (lambda: ng.Bernoulli().dual(1.0), ValueError, "`Bernoulli.dual`.*between 0 and 1"),
    "categorical_zero": (
        lambda: ng.Categorical().to_natural([0.0, 1.0]),
        ValueError,
        "probabilities above 0.*Smooth",
    ),
    "categorical_sum": (
        lambda: ng.Categorical().to_natural([0.4, 0.4]),
        ValueError,
        "probabilities that sum to 1.*Normalise",
    ),
    "minimal_categorical": (
        lambda: ng.MinimalCategorical().to_natural([0.4, 0.6]),
        ValueError,
        "leave something for the last class.*sum below 1.*Smooth",
    ),
    "gaussian_precision": (
        lambda: ng.GaussianPrecision().to_natural(INDEFINITE),
        ValueError,
        "the covariance `-2 xi` to be positive definite",
    ),
    "asymmetric_gaussian_precision": (
        lambda: ng.GaussianPrecision().to_natural(-ASYMMETRIC),
        ValueError,
        "the covariance `-2 xi` to be symmetric",
    ),
    "gaussian": (
        lambda: ng.Gaussian(1).to_natural(([1.0], [[-0.5]])),
        ValueError,
        r"the covariance `-2 xi\[1\] - xi\[0\] xi\[0\]'` to be positive definite",
    ),
    "poisson": (lambda: ng.Poisson().to_natural(0.0), ValueError, "rates above 0.*pseudo-count"),
    "exponential": (lambda: ng.Exponential().to_natural(0.0), ValueError, "means above 0.*more data"),
    "gamma_mean": (lambda: ng.Gamma().to_natural([0.0, -1.0]), ValueError, r"means `xi\[..., 1\]` above 0"),
    "gamma_jensen": (
        lambda: ng.Gamma().to_natural([0.0, 1.0]),
        ValueError,
        r"`xi\[..., 0\]` below the logarithm of the mean \(Jensen\).*equal.*float64 or more data",
    ),
    "beta_jensen": (
        lambda: ng.Beta().to_natural(np.log([0.5, 0.5])),
        ValueError,
        r"sum to less than 1 \(Jensen\).*float64 or more data",
    ),
    "dirichlet_jensen": (lambda: ng.Dirichlet().to_natural(np.log([0.5, 0.3, 0.3])), ValueError, "Jensen"),
    "geometric": (lambda: ng.Geometric().to_natural(0.0), ValueError, "means above 0.*pseudo-count"),
    "negative_binomial": (lambda: ng.NegativeBinomial(2).to_natural(-1.0), ValueError, "means above 0"),
    "product": (lambda: PAIR().to_natural((0.5, 0.0)), ValueError, "`Product.to_natural`.*rates above 0"),
    "not_stated": (
        lambda: Logistic().to_natural([0.5]),
        ValueError,
        "`Logistic` has neither a closed form.*State `_to_natural` or `_initial_natural`",
    ),
}

OBSERVATION = {
    "text": (
        lambda: ng.Bernoulli().log_prob(0.0, "yes"),
        TypeError,
        "`Bernoulli.log_prob`: observation `x`.*real numbers.*`str`",
    ),
    "complex": (lambda: ng.Bernoulli().score(0.0, np.array(1j)), TypeError, "`Bernoulli.score`.*complex128"),
    "none": (lambda: ng.GaussianMean().log_prob(0.0, None), ValueError, "observation `x` needs finite"),
    "nan": (lambda: ng.GaussianMean().log_prob(0.0, NAN), ValueError, "observation `x` needs finite.*nan"),
    "infinite": (lambda: ng.Exponential().log_prob(-1.0, np.inf), ValueError, "observation `x` needs finite"),
    "batch": (
        lambda: ng.Bernoulli().log_prob(0.0, np.ones(5)),
        ValueError,
        r"observation `x` must have shape \(\).*\(5,\).*one observation at a time.*`jax.vmap`",
    ),
    "labels_of_a_batch": (
        lambda: ng.Categorical().log_prob(np.zeros(3), np.array([0, 1])),
        ValueError,
        r"shape \(\).*\(2,\).*`jax.vmap`",
    ),
    "other_dimension": (
        lambda: ng.GaussianPrecision().log_prob(np.eye(2), np.ones(3)),
        ValueError,
        r"shape \(2,\).*\(3,\)",
    ),
    "shapes_in_product": (
        lambda: PAIR().log_prob((0.0, 1.0), (1.0, np.ones(3))),
        ValueError,
        r"`Product.log_prob`.*shape \(\(\), \(\)\).*\(\(\), \(3,\)\)",
    ),
    "structure_in_product": (
        lambda: PAIR().log_prob((0.0, 1.0), (1.0,)),
        TypeError,
        "observation `x` must have the structure of `Product.families`",
    ),
    "statistics_dimension": (
        lambda: ng.Gaussian(2).sufficient_statistics(np.ones(3)),
        ValueError,
        r"`Gaussian.sufficient_statistics`: observation `x`.*trailing shape \(..., 2\), but got \(3,\)",
    ),
    "statistics_of_a_number": (
        lambda: ng.Dirichlet().sufficient_statistics(0.5),
        ValueError,
        r"trailing shape \(..., any above 0\), but got \(\)",
    ),
    "float_labels": (
        lambda: ng.Categorical().log_prob(np.zeros(3), np.array([0.0, 1.0, 0.0])),
        TypeError,
        r"observation `x` must be integer labels.*`float64`.*`jnp.argmax\(x, axis=-1\)`",
    ),
    "float_label": (lambda: ng.MinimalCategorical().log_prob(np.zeros(3), 1.0), TypeError, "labels.*`float`"),
    "text_label": (lambda: ng.Categorical().log_prob(np.zeros(3), "cat"), TypeError, "labels.*`str`"),
    "negative_label": (
        lambda: ng.Categorical(3).sufficient_statistics(-1),
        ValueError,
        "labels of at least 0 and below 3.*`-1`.*from 0",
    ),
    "large_label": (lambda: ng.Categorical(3).log_prob(np.zeros(3), 3), ValueError, "below 3.*`3`"),
    "label_beyond_the_logits": (
        lambda: ng.Categorical().log_prob(np.zeros(3), 3),
        ValueError,
        "`Categorical.log_prob`.*labels of at least 0 and below 3.*`3`",
    ),
    "score_of_a_label_beyond_the_logits": (
        lambda: ng.MinimalCategorical().score(np.zeros(2), 3),
        ValueError,
        "below 3",
    ),
    "label_beyond_the_logits_in_product": (
        lambda: ng.Product([ng.Categorical()]).log_prob([np.zeros(3)], [3]),
        ValueError,
        "below 3",
    ),
    "unknown_number_of_classes": (
        lambda: ng.Categorical().sufficient_statistics(1),
        ValueError,
        r"`Categorical` cannot tell the number of classes.*`Categorical\(num_classes=...\)`",
    ),
    "unknown_number_of_minimal_classes": (
        lambda: ng.MinimalCategorical().maximum_likelihood(np.array([0, 1])),
        ValueError,
        r"cannot tell.*`MinimalCategorical\(num_classes=...\)`",
    ),
    "bernoulli": (lambda: ng.Bernoulli().log_prob(0.0, 2), ValueError, "values from 0 to 1.*Rescale"),
    "poisson_fraction": (lambda: ng.Poisson().log_prob(0.0, 0.5), ValueError, "whole numbers.*Check the data"),
    "poisson_negative": (lambda: ng.Poisson().log_prob(0.0, -1), ValueError, "whole numbers"),
    "geometric": (lambda: ng.Geometric().log_prob(-1.0, 0.5), ValueError, "whole numbers"),
    "negative_binomial": (lambda: ng.NegativeBinomial(2).log_prob(-1.0, -1), ValueError, "whole numbers"),
    "exponential": (lambda: ng.Exponential().log_prob(-1.0, -1), ValueError, "times of at least 0.*Check"),
    "gamma": (lambda: ng.Gamma().log_prob([1.0, -1.0], 0), ValueError, "numbers above 0.*drop the zeros"),
    "beta": (lambda: ng.Beta().log_prob([1.0, 1.0], 1), ValueError, "strictly between 0 and 1.*Squeeze"),
    "dirichlet_zero": (
        lambda: ng.Dirichlet().log_prob([1.0, 1.0], [0.0, 1.0]),
        ValueError,
        "probabilities above 0.*Smooth",
    ),
    "dirichlet_sum": (
        lambda: ng.Dirichlet().log_prob([1.0, 1.0], [0.5, 0.6]),
        ValueError,
        "sum to 1.*Normalise",
    ),
}

MAXIMUM_LIKELIHOOD = {
    "no_data": (
        lambda: ng.Bernoulli().maximum_likelihood(np.zeros(0)),
        ValueError,
        r"`Bernoulli.maximum_likelihood`.*at least one observation.*`xs`.*\(0,\).*Stack",
    ),
    "no_labels": (
        lambda: ng.Categorical(3).maximum_likelihood(np.zeros(0, int)),
        ValueError,
        "at least one observation",
    ),
    "one_number": (lambda: ng.Poisson().maximum_likelihood(3.0), ValueError, r"at least one.*\(\).*Stack"),
    "one_vector": (
        lambda: ng.Gaussian(2).maximum_likelihood(np.ones(2)),
        ValueError,
        r"average statistic of `xs`.*trailing shape \(..., 2\), but got \(\)",
    ),
    "numbers_of_observations": (
        lambda: PAIR().maximum_likelihood((np.ones(2), np.ones(3))),
        ValueError,
        r"at least one observation along the leading axis.*\(2,\), \(3,\)",
    ),
    "outside": (
        lambda: ng.Gamma().maximum_likelihood([1.0, 0.0]),
        ValueError,
        "`Gamma.maximum_likelihood`: observation array `xs` needs numbers above 0",
    ),
    "same_label": (
        lambda: ng.Categorical(3).maximum_likelihood(np.array([1, 1])),
        ValueError,
        "average statistic of `xs` needs probabilities above 0.*Smooth",
    ),
    "same_outcome": (lambda: ng.Bernoulli().maximum_likelihood([1.0, 1.0]), ValueError, "between 0 and 1"),
    "nothing_counted": (lambda: ng.Poisson().maximum_likelihood([0, 0]), ValueError, "above 0.*pseudo-count"),
    "no_failures": (lambda: ng.Geometric().maximum_likelihood([0, 0]), ValueError, "above 0.*pseudo-count"),
    "no_time": (lambda: ng.Exponential().maximum_likelihood([0.0]), ValueError, "means above 0"),
    "same_number": (lambda: ng.Gamma().maximum_likelihood([0.1] * 7), ValueError, "Jensen.*equal"),
    "same_share": (lambda: ng.Beta().maximum_likelihood([0.5] * 3), ValueError, "Jensen.*equal"),
    "same_shares": (
        lambda: ng.Dirichlet().maximum_likelihood([[0.25, 0.75]] * 3),
        ValueError,
        "Jensen.*equal",
    ),
    "too_few_for_a_covariance": (
        lambda: ng.GaussianPrecision().maximum_likelihood([[1.0, 2.0]]),
        ValueError,
        "covariance.*positive definite",
    ),
}

REFUSED = {
    f"{kind}-{name}": case
    for kind, group in {
        "construction": CONSTRUCTION,
        "natural": NATURAL,
        "moments": MOMENTS,
        "observation": OBSERVATION,
        "maximum_likelihood": MAXIMUM_LIKELIHOOD,
    }.items()
    for name, case in group.items()
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    call, error, words = REFUSED[name]
    with pytest.raises(error, match=f"(?s){words}"):
        call()


@pytest.mark.parametrize(
    ("function", "argument", "words"),
    [
        (lambda eta: ng.Exponential().entropy(eta), 0.5, "negative numbers.*some entry was not.*`-rate`"),
        (lambda eta: ng.Bernoulli().entropy(eta), NAN, "needs finite numbers"),
        (lambda eta: ng.GaussianPrecision().entropy(eta), INDEFINITE, "positive definite"),
        (lambda xi: ng.Bernoulli().to_natural(xi), 1.0, "`xi`.*between 0 and 1.*Smooth"),
        (lambda x: ng.Poisson().log_prob(0.0, x), 0.5, "whole numbers"),
        (lambda x: ng.Categorical().log_prob(jnp.zeros(3), x), 3, "below 3"),
        (lambda xs: ng.Gamma().maximum_likelihood(xs), np.ones(3), "Jensen"),
        (lambda xi: ng.Beta().to_natural(xi), np.array([-1e-300, -800.0]), NOT_CONVERGED),
        (lambda count: ng.NegativeBinomial(count).entropy(-1.0), -1.0, "count above 0"),
        (lambda covariance: ng.GaussianMean(covariance).entropy(1.0), -1.0, "positive variances"),
    ],
    ids=[
        "natural",
        "nan",
        "matrix",
        "moments",
        "observation",
        "label",
        "maximum_likelihood",
        "newton",
        "count",
        "covariance",
    ],
)
def test_refused_under_jit(function, argument, words):
    with pytest.raises(RuntimeError, match=f"(?s){words}"):
        jax.block_until_ready(eqx.filter_jit(function)(jnp.asarray(argument)))


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda eta: ng.Categorical(3).entropy(eta), ValueError, "trailing shape"),
        (lambda x: ng.Bernoulli().log_prob(0.0, x), ValueError, "`jax.vmap`"),
        (lambda x: ng.Categorical().log_prob(jnp.zeros(3), x), TypeError, "integer labels"),
    ],
    ids=["natural", "observation", "labels"],
)
def test_shapes_and_dtypes_are_refused_while_tracing(call, error, words):
    with pytest.raises(error, match=words):
        jax.eval_shape(call, jax.ShapeDtypeStruct((2,), jnp.float64))


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", FAMILIES)
def test_products_with_the_metric_carry_no_checks(name):
    family, eta, *_ = FAMILIES[name]()
    geometry = ng.Fisher(family)
    for function in (geometry.metric_mv, geometry.dissimilarity):
        assert "callback" not in str(jax.make_jaxpr(function)(eta, eta))
    assert "callback" in str(jax.make_jaxpr(family.log_partition)(eta))
