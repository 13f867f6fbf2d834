"""Second moments of the gradients of single examples, which are not Fisher metrics."""

from collections.abc import Callable

import jax
from jaxtyping import PyTree

from natgrad._check import public
from natgrad._metric.linearise import linearise
from natgrad._metric.output import ColumnsOutputMetric
from natgrad._metric.pullback import PullbackMetric, make_metric
from natgrad._model import without_aux


@public
def empirical_fisher(
    model: Callable,
    loss: Callable,
    params: PyTree,
    x: PyTree,
    y: PyTree = None,
    *,
    has_aux: bool = False,
    check: bool = True,
) -> PullbackMetric:
    r"""The second moment $\frac1N\sum_i g_i g_i^\top$ of the gradients $g_i$ of the examples' losses.

    !!! warning "This is not the Fisher metric"
        The Fisher metric averages over targets drawn from the model; this one uses the targets of the data. The two
        agree only where the model fits the distribution of the data, and far from there the directions they give differ
        widely.
        Use `pullback(model, Fisher(family), ...)` for the Fisher metric, `key=...` if it should cost no more than
        this.

    `loss(z, y)` is written for one example; `has_aux` and `check` are as for `pullback`."""
    model = without_aux(model, has_aux)
    return _gradient_moment(model, loss, params, x, y, check, is_centred=False)


@public
def gradient_covariance(
    model: Callable,
    loss: Callable,
    params: PyTree,
    x: PyTree,
    y: PyTree = None,
    *,
    has_aux: bool = False,
    check: bool = True,
) -> PullbackMetric:
    r"""The covariance $\frac1N\sum_i (g_i - \bar g)(g_i - \bar g)^\top$ of the gradients of the examples' losses (with
    divisor $N$), so that `empirical_fisher` is this plus $\bar g\,\bar g^\top$. Arguments are as for
    `empirical_fisher`."""
    model = without_aux(model, has_aux)
    return _gradient_moment(model, loss, params, x, y, check, is_centred=True)


def _gradient_moment(model, loss, params, x, y, check, *, is_centred) -> PullbackMetric:
    linearisation = linearise(model, params, x)
    cotangents = jax.vmap(jax.grad(loss))(linearisation.z, y)
    columns = jax.tree.map(lambda s: s[:, None], cotangents)
    output = ColumnsOutputMetric(columns, is_centred)
    return make_metric(linearisation, output, (model, params, x), check=check)
