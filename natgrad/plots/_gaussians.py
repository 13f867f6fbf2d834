r"""The Fisher metric $\operatorname{diag}(1/\sigma^2, 2/\sigma^2)$ of Gaussians, and steepest descent in it."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

import natgrad as ng
from natgrad.plots._style import arrow, canvas, ellipse, themed


def natural(w: Array) -> tuple[Array, Array]:
    """A Gaussian with mean and standard deviation `w`, in its natural parameters."""
    mean, sigma = w
    return (mean / sigma**2)[None], (1 / sigma**2)[None, None]


@jax.jit
def fisher_metric(w: Array) -> Array:
    r"""The Fisher metric of mean and standard deviation, $\operatorname{diag}(1/\sigma^2, 2/\sigma^2)$."""
    return ng.pullback(natural, ng.Fisher(ng.Gaussian(1)), w).as_matrix()


CENTRES = tuple((mean, sigma) for mean in (-2.0, 0.0, 2.0) for sigma in (0.4, 0.9, 1.7))


@themed
def fisher_ellipses(palette):
    r"""Left: Gaussians on one ellipse are equally hard to tell from the Gaussian at its centre. Right: a shift that is
    plain for a narrow Gaussian is hardly visible for a wide one.

    The Fisher metric of mean and standard deviation is $\operatorname{diag}(1/\sigma^2, 2/\sigma^2)$."""
    figure, (left, right) = canvas(2, height=3.4, width=9.5)
    for centre in CENTRES:
        left.plot(*ellipse(fisher_metric(jnp.array(centre)), centre, 0.35).T, color=palette.blue, linewidth=1.5)
        left.plot(*centre, ".", color=palette.ink, markersize=4)
    left.set(
        xlabel=r"mean $\mu$", ylabel=r"standard deviation $\sigma$", xlim=(-3.1, 3.1), ylim=(0, 2.5), aspect="equal"
    )
    left.set_title("Balls of equal radius in the Fisher metric")
    x = np.linspace(-4.6, 4.6, 400)
    for sigma, color in ((0.5, palette.red), (1.5, palette.blue)):
        for mean, style in ((-0.35, "-"), (0.35, "--")):
            density = np.exp(-((x - mean) ** 2) / (2 * sigma**2)) / (sigma * np.sqrt(2 * np.pi))
            right.plot(x, density, color=color, linestyle=style)
        right.plot([], [], color=color, label=rf"$\sigma = {sigma}$, means $\pm 0.35$")
    right.set(xlabel="$x$", ylabel="density", ylim=(0, 0.98))
    right.set_title("The same shift of the mean")
    right.legend(loc="upper left")
    return figure


TARGET = (1.0, 1.0)
STARTS = ((-2.5, 0.6), (-2.5, 2.0), (3.0, 0.7), (3.3, 2.2), (0.0, 2.6))


def cost(w: Array) -> Array:
    """The Kullback-Leibler divergence from the target, which maximum likelihood minimises."""
    gaussian = ng.Gaussian(1)
    return gaussian._kl(natural(jnp.array(TARGET)), natural(w))


@jax.jit
def directions(w: Array) -> tuple[Array, Array]:
    """Directions of steepest descent, of length one in the Euclidean and in the Fisher metric."""
    gradient = jax.grad(cost)(w)
    metric = ng.pullback(natural, ng.Fisher(ng.Gaussian(1)), w)
    steepest = ng.sharp(metric, gradient).tree
    return -gradient / jnp.linalg.norm(gradient), -steepest / metric.norm(steepest)


@themed
def steepest_descent(palette):
    """The direction of steepest descent depends on how the length of a step is measured: on the circle of the Euclidean
    metric, or on the ellipse of the Fisher metric."""
    figure, axes = canvas(1, height=3.9, width=7.2)
    means, sigmas = np.linspace(-4, 4.6, 200), np.linspace(0.25, 3.4, 200)
    heights = jax.jit(jax.vmap(jax.vmap(cost)))(jnp.stack(jnp.meshgrid(means, sigmas), axis=-1))
    axes.contour(means, sigmas, np.log(heights + 1e-3), 16, cmap=palette.shades, linewidths=0.7, alpha=0.55)
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
    axes.set(
        xlabel=r"mean $\mu$", ylabel=r"standard deviation $\sigma$", xlim=(-4, 4.6), ylim=(0.0, 3.7), aspect="equal"
    )
    axes.set_title("Fitting a Gaussian")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure
