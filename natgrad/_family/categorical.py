import equinox as eqx
import jax
import jax.numpy as jnp
from jax.nn import logsumexp, softmax
from jaxtyping import Array

from natgrad._check import Requirement
from natgrad._family.base import AbstractFamily
from natgrad._family.special import measure_kl


class Categorical(AbstractFamily):
    r"""One of $K$ classes, with one logit a class.

    $t(x)$ is the one-hot row and $\log Z = \log\sum_k e^{\eta_k}$.

    Not minimal: adding a constant to all logits changes nothing, so the Fisher matrix
    $\operatorname{diag}(p) - p p^\top$ annihilates the all-ones vector and `to_natural` returns log
    probabilities, one choice among the equivalent ones. Data are integer labels. The number of classes is read from the
    logits; only `sufficient_statistics` and `maximum_likelihood` need it stated.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.Categorical()
    logits = jnp.array([0.0, 0.0, jnp.log(2.0)])
    assert jnp.allclose(family.to_moments(logits), jnp.array([0.25, 0.25, 0.5]))
    assert jnp.allclose(family.log_prob(logits, jnp.array(2)), jnp.log(0.5))
    assert jnp.allclose(family.fisher(logits) @ jnp.ones(3), 0, atol=1e-6)
    ```
    """

    num_classes: int | None = eqx.field(default=None, static=True)

    observation_type = int

    def __check_init__(self):
        check_num_classes(self)

    @property
    def _event_shapes(self):
        return ((self.num_classes,),)

    def _log_partition(self, eta):
        return jnp.sum(logsumexp(eta, axis=-1))

    def _statistics(self, x):
        return one_hot(self, x)

    def _draw(self, eta, key):
        return jax.random.categorical(key, eta)

    def _natural_domain(self, eta):
        return []

    def _moment_domain(self, xi):
        total = jnp.sum(xi, axis=-1)
        # Probabilities that were computed add up to one with half of their digits at least; percentages do not.
        slack = jnp.sqrt(jnp.finfo(xi.dtype).eps)
        return [
            Requirement(jnp.all(xi > 0), "probabilities above 0", "Smooth the counts first."),
            Requirement(jnp.all(jnp.abs(total - 1) <= slack), "probabilities that sum to 1", "Normalise them."),
        ]

    def _support(self, x):
        return label_range(x, self.num_classes)

    def _sized(self, eta):
        return Categorical(eta.shape[-1])

    def _to_moments(self, eta):
        return softmax(eta, axis=-1)

    def _to_natural(self, xi):
        return jnp.log(xi)

    def _tangent_moments(self, v):
        return v - jnp.mean(v, axis=-1, keepdims=True)

    def _fisher_mv(self, eta, v):
        # The metric annihilates constants, so the entry of the likeliest class is subtracted from `v`: then `1 - p` is
        # never formed where `p` rounds to 1.
        p, v = softmax(eta, axis=-1), v - at_likeliest(eta, v)
        return p * (v - jnp.sum(p * v, axis=-1, keepdims=True))

    def _event_factor(self, eta):
        # (diag(p) - p p') = S S' with S = (I - p 1') diag(sqrt p): its columns are sqrt(p_k) (e_k - p).
        p = softmax(eta)
        return jnp.sqrt(p)[:, None] * (jnp.eye(p.size, dtype=p.dtype) - p[None, :])

    def _log_prob(self, eta, x):
        taken = jnp.take_along_axis(log_probabilities(eta), x[..., None], axis=-1)[..., 0]
        # An index below zero would count from the last class.
        return jnp.sum(jnp.where((x >= 0) & (x < eta.shape[-1]), taken, jnp.nan))

    def _score(self, eta, x):
        return jax.nn.one_hot(x, eta.shape[-1], dtype=eta.dtype) - softmax(eta, axis=-1)

    def _kl(self, eta1, eta2):
        log_p, log_q = log_probabilities(eta1), log_probabilities(eta2)
        return jnp.sum(measure_kl(jnp.exp(log_p), jnp.exp(log_q), log_q - log_p))

    def _entropy(self, eta):
        return -jnp.sum(softmax(eta, axis=-1) * log_probabilities(eta))


class MinimalCategorical(AbstractFamily):
    r"""One of $K$ classes in minimal form: $K - 1$ log odds against the last class, whose logit is 0.

    The same distributions as `Categorical`, with an invertible Fisher matrix.

    ```python
    import jax.numpy as jnp
    import natgrad as ng

    family = ng.MinimalCategorical(3)
    log_odds = jnp.zeros(2)
    assert jnp.allclose(family.to_moments(log_odds), 1 / 3)
    assert jnp.allclose(family.log_prob(log_odds, jnp.array(2)), jnp.log(1 / 3))
    ```
    """

    num_classes: int | None = eqx.field(default=None, static=True)

    observation_type = int

    def __check_init__(self):
        check_num_classes(self)

    @property
    def _event_shapes(self):
        return ((None if self.num_classes is None else self.num_classes - 1,),)

    def _log_partition(self, eta):
        return Categorical()._log_partition(with_last_class(eta))

    def _statistics(self, x):
        return one_hot(self, x)[..., :-1]

    def _draw(self, eta, key):
        return jax.random.categorical(key, with_last_class(eta))

    def _natural_domain(self, eta):
        return []

    def _moment_domain(self, xi):
        inside = jnp.all(xi > 0) & jnp.all(jnp.sum(xi, axis=-1) < 1)
        return [
            Requirement(
                inside,
                "probabilities above 0 that leave something for the last class (a sum below 1)",
                "Smooth the counts first.",
            )
        ]

    def _support(self, x):
        return label_range(x, self.num_classes)

    def _sized(self, eta):
        return MinimalCategorical(eta.shape[-1] + 1)

    def _to_moments(self, eta):
        return softmax(with_last_class(eta), axis=-1)[..., :-1]

    def _to_natural(self, xi):
        return jnp.log(xi) - jnp.log1p(-jnp.sum(xi, axis=-1, keepdims=True))

    def _fisher_mv(self, eta, v):
        return Categorical()._fisher_mv(with_last_class(eta), with_last_class(v))[..., :-1]

    def _event_factor(self, eta):
        # The rows of the full factor that remain, rotated so that the last column vanishes:
        # S = diag(sqrt p) - c p sqrt(p)' with 1 / c = 1 + sqrt(p_last).
        # On the diagonal 1 - p is the sum of the other probabilities, which does not vanish where p rounds to 1.
        full = softmax(with_last_class(eta))
        p, last = full[:-1], full[-1]
        off_diagonal = 1 - jnp.eye(full.size, dtype=full.dtype)
        diagonal = jnp.sqrt(last) + (off_diagonal @ full)[:-1]
        columns = jnp.diag(diagonal) - off_diagonal[:-1, :-1] * p[None, :]
        return jnp.sqrt(p)[:, None] * columns / (1 + jnp.sqrt(last))

    def _log_prob(self, eta, x):
        return Categorical()._log_prob(with_last_class(eta), x)

    def _score(self, eta, x):
        return Categorical()._score(with_last_class(eta), x)[..., :-1]

    def _kl(self, eta1, eta2):
        return Categorical()._kl(with_last_class(eta1), with_last_class(eta2))

    def _entropy(self, eta):
        return Categorical()._entropy(with_last_class(eta))


def at_likeliest(eta: Array, values: Array) -> Array:
    return jnp.take_along_axis(values, jnp.argmax(eta, axis=-1, keepdims=True), axis=-1)


def log_probabilities(eta: Array) -> Array:
    """The logarithm of softmax, also where a probability rounds to 1."""
    shifted = eta - at_likeliest(eta, eta)
    likeliest = jax.nn.one_hot(jnp.argmax(eta, axis=-1), eta.shape[-1], dtype=bool)
    others = jnp.sum(jnp.exp(shifted), axis=-1, keepdims=True, where=~likeliest)
    return shifted - jnp.log1p(others)


def with_last_class(eta: Array) -> Array:
    return jnp.concatenate([eta, jnp.zeros_like(eta[..., :1])], axis=-1)


def check_num_classes(family) -> None:
    if family.num_classes is not None and family.num_classes < 2:
        raise ValueError(
            f"`{type(family).__name__}` needs at least 2 classes, but got `num_classes={family.num_classes}`."
        )


def one_hot(family, x: Array) -> Array:
    if family.num_classes is None:
        name = type(family).__name__
        raise ValueError(
            f"`{name}` cannot tell the number of classes from labels alone. Write `{name}(num_classes=...)`."
        )
    return jax.nn.one_hot(x, family.num_classes, dtype=jnp.result_type(float))


def label_range(x: Array, num_classes: int | None) -> list[Requirement]:
    inside = jnp.all(x >= 0) if num_classes is None else jnp.all((x >= 0) & (x < num_classes))
    upper = "" if num_classes is None else f" and below {num_classes}"
    return [Requirement(inside, f"labels of at least 0{upper}", "Number the classes from 0.")]
