import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import natgrad as ng
from natgrad.plots._style import arrow, canvas, ellipse, themed


def natural(w: Array) -> tuple[Array, Array]:
    """A Gaussian with mean and standard deviation `w`, in its natural parameters."""
    mean, deviation = w
    return (mean / deviation**2)[None], (1 / deviation**2)[None, None]


@jax.jit
def fisher_metric(w: Array) -> Array:
    r"""The Fisher metric of means and deviations, $\operatorname{diag}(1/\sigma^2, 2/\sigma^2)$."""
    return ng.pullback(natural, ng.Fisher(ng.Gaussian(1)), w).as_matrix()


CENTRES = tuple((mean, deviation) for mean in (-2.0, 0.0, 2.0) for deviation in (0.4, 0.9, 1.7))


@themed
def fisher_ellipses(palette):
    r"""Univariate Gaussians that are equally hard to tell from the one in the middle: the Fisher metric of mean and
    deviation is $\operatorname{diag}(1/\sigma^2, 2/\sigma^2)$, so wide ones may move further."""
    figure, (left, right) = canvas(2, height=3.4, width=9.5)
    for centre in CENTRES:
        left.plot(*ellipse(fisher_metric(jnp.array(centre)), centre, 0.35).T, color=palette.blue, linewidth=1.5)
        left.plot(*centre, ".", color=palette.ink, markersize=4)
    left.set(xlabel=r"mean $\mu$", ylabel=r"deviation $\sigma$", xlim=(-3.1, 3.1), ylim=(0, 2.5), aspect="equal")
    left.set_title("Balls of one radius in the Fisher metric")
    x = np.linspace(-4.6, 4.6, 400)
    for deviation, color in ((0.5, palette.red), (1.5, palette.blue)):
        for mean, style in ((-0.35, "-"), (0.35, "--")):
            density = np.exp(-((x - mean) ** 2) / (2 * deviation**2)) / (deviation * np.sqrt(2 * np.pi))
            right.plot(x, density, color=color, linestyle=style)
        right.plot([], [], color=color, label=rf"$\sigma = {deviation}$, means $\pm 0.35$")
    right.set(xlabel="$x$", ylabel="density", ylim=(0, 0.98))
    right.set_title("The same shift, plain and hidden")
    right.legend(loc="upper left")
    return figure


TARGET = (1.0, 1.0)
STARTS = ((-2.5, 0.6), (-2.5, 2.0), (3.0, 0.7), (3.3, 2.2), (0.0, 2.6))


def cost(w: Array) -> Array:
    """The divergence from the target, which is what maximum likelihood minimises."""
    gaussian = ng.Gaussian(1)
    return gaussian._kl(natural(jnp.array(TARGET)), natural(w))


@jax.jit
def directions(w: Array) -> tuple[Array, Array]:
    """Downhill, of length one in the Euclidean and in the Fisher metric."""
    gradient = jax.grad(cost)(w)
    metric = ng.pullback(natural, ng.Fisher(ng.Gaussian(1)), w)
    steepest = ng.sharp(metric, gradient).tree
    return -gradient / jnp.linalg.norm(gradient), -steepest / metric.norm(steepest)


@themed
def steepest_descent(palette):
    """What is steepest depends on how steps are measured: most descent for a step on the circle, or for one on the
    ellipse of Gaussians that are equally hard to tell apart."""
    figure, axes = canvas(1, height=3.9, width=7.2)
    means, deviations = np.linspace(-4, 4.6, 200), np.linspace(0.25, 3.4, 200)
    heights = jax.jit(jax.vmap(jax.vmap(cost)))(jnp.stack(jnp.meshgrid(means, deviations), axis=-1))
    axes.contour(means, deviations, np.log(heights + 1e-3), 16, cmap=palette.shades, linewidths=0.7, alpha=0.55)
    for number, start in enumerate(STARTS):
        w = jnp.array(start)
        euclid, fisher = directions(w)
        radius = 0.35
        axes.plot(*ellipse(np.eye(2), start, radius).T, color=palette.red, linewidth=0.9)
        axes.plot(*ellipse(fisher_metric(w), start, radius).T, color=palette.blue, linewidth=0.9)
        label = number == 0
        arrow(axes, start, radius * euclid, palette.red, "steepest in the Euclidean metric" if label else None)
        arrow(axes, start, radius * fisher, palette.blue, "steepest in the Fisher metric" if label else None)
    axes.plot(*TARGET, "*", color=palette.ink, markersize=14)
    axes.set(xlabel=r"mean $\mu$", ylabel=r"deviation $\sigma$", xlim=(-4, 4.6), ylim=(0.0, 3.7), aspect="equal")
    axes.set_title("Fitting a Gaussian")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
