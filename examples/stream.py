"""A network learns a curve from a stream, every example once, and follows when the curve changes halfway.

An extended Kalman filter without a learning rate, against gradient descent with the best of eight."""

from pathlib import Path

import jax
import jax.numpy as jnp
from matplotlib.figure import Figure

import natgrad as ng

LENGTH, CHANGE, NOISE = 2000, 1000, 0.1


def network(params, x):
    return jnp.tanh(x[:, None] @ params["a"] + params["b"][None]) @ params["c"]


def stream(key: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Inputs, noisy outputs, and the curve without noise."""
    keys = jax.random.split(key)
    x = jax.random.uniform(keys[0], (LENGTH,), minval=-3.0, maxval=3.0)
    curve = jnp.where(jnp.arange(LENGTH) < CHANGE, jnp.sin(2 * x), jnp.cos(3 * x))
    return x, curve + NOISE * jax.random.normal(keys[1], (LENGTH,)), curve


def initial(key: jax.Array) -> dict[str, jax.Array]:
    keys = jax.random.split(key, 3)
    shapes = {"a": (1, 20), "b": (20,), "c": (20,)}
    return {name: jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


@jax.jit
def filtered(params, x, y):
    """The predictions before each example was absorbed."""
    likelihood = ng.Objective(lambda z, y: (z - y) ** 2 / (2 * NOISE**2), (1 / NOISE**2) * ng.Euclidean())
    opt = ng.OnlineNaturalGradient(network, likelihood, forget=0.995)

    def step(carry, pair):
        (params, state), batch = carry, (pair[0][None], pair[1][None])
        return opt.step(params, state, batch)[:2], network(params, batch[0])[0]

    return jax.lax.scan(step, (params, opt.init(params)), (x, y))[1]


@jax.jit
def descended(params, x, y, rate):
    def step(params, pair):
        loss = lambda params: (network(params, pair[0][None])[0] - pair[1]) ** 2 / 2
        return jax.tree.map(lambda w, g: w - rate * g, params, jax.grad(loss)(params)), network(params, pair[0][None])[
            0
        ]

    return jax.lax.scan(step, params, (x, y))[1]


def main() -> None:
    (x, y, curve), params = stream(jax.random.key(0)), initial(jax.random.key(1))
    error = lambda predicted: (predicted - curve) ** 2
    rates = jnp.geomspace(1e-3, 0.3, 8)
    runs = jax.vmap(lambda rate: error(descended(params, x, y, rate)))(rates)
    best = int(jnp.nanargmin(jnp.mean(runs, axis=1)))
    errors = {"online natural gradient": error(filtered(params, x, y)), f"descent, rate {rates[best]:.2g}": runs[best]}
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    axes = figure.subplots()
    for (name, own), color in zip(errors.items(), ("#0072B2", "#D55E00"), strict=True):
        print(f"{name:26} mean squared error {jnp.mean(own):.4f}, of the last 200 {jnp.mean(own[-200:]):.4f}")
        axes.semilogy(jnp.convolve(own, jnp.ones(50) / 50, mode="valid"), color=color, label=name)
    axes.axvline(CHANGE, color="grey", linewidth=0.8, linestyle=":")
    axes.set(xlabel="examples", ylabel="squared error, mean of 50", title="A curve that changes")
    axes.legend(frameon=False)
    Path("out").mkdir(exist_ok=True)
    figure.savefig("out/stream.png", dpi=200)
    print("\nThe figure is out/stream.png.")


if __name__ == "__main__":
    main()
