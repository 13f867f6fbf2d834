"""How long kfac-jax takes to its first steps on the reduced MNIST autoencoder, and for a step, and how far it gets.

Runs in an environment of its own, made from `requirements/kfac-jax.txt`, and prints JSON. The configuration is that of
its authors' example: damping from 150 with decay 0.95 and at least 1e-5, inverses every 5 steps, everything adaptive, 5
updates of the factors before the first step. The argument is a file with the images and the initial parameters."""

# pyright: reportMissingImports=false

import itertools
import json
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import kfac_jax
import numpy as np
import scipy.linalg  # noqa: F401  JAX imports it when it first factors a matrix, and imports are excluded

L2 = 1e-5


def model(params, x):
    for k, (w, b) in enumerate(params):
        x = x @ w + b
        x = x if k in (2, len(params) - 1) else jnp.tanh(x)
    return x


def loss(params, batch):
    x, y = batch
    z = model(params, x)
    kfac_jax.register_multi_bernoulli_predictive_distribution(z, y)
    penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return jnp.mean(jnp.sum(jax.nn.softplus(z) - y * z, axis=-1)) + L2 / 2 * penalty


def main(path: str) -> None:
    with np.load(path) as arrays:
        x = jnp.asarray(arrays["x"])
        count = (len(arrays.files) - 1) // 2
        params = [(jnp.asarray(arrays[f"w{k}"]), jnp.asarray(arrays[f"b{k}"])) for k in range(count)]
    batch = x, x
    jax.block_until_ready((batch, params))
    start = time.perf_counter()
    optimizer = kfac_jax.Optimizer(
        value_and_grad_func=jax.value_and_grad(loss),
        l2_reg=L2,
        use_adaptive_learning_rate=True,
        use_adaptive_momentum=True,
        use_adaptive_damping=True,
        initial_damping=150.0,
        damping_adaptation_decay=0.95,
        min_damping=1e-5,
        inverse_update_period=5,
        num_burnin_steps=5,
        multi_device=False,
    )
    rng, batches = jax.random.PRNGKey(1), itertools.repeat(batch)
    state = optimizer.init(params, rng, batch)
    spent, losses, seconds = {}, {}, []
    for number in range(151):
        rng, own = jax.random.split(rng)
        begun = time.perf_counter()
        params, state, stats = optimizer.step(params, state, own, data_iterator=batches, global_step_int=number)
        jax.block_until_ready(params)
        seconds.append(time.perf_counter() - begun)
        if number + 1 in (1, 11):
            spent[str(number + 1)] = time.perf_counter() - start
        losses[str(number)] = float(stats["loss"])
    gradient = jax.jit(jax.value_and_grad(loss))
    jax.block_until_ready(gradient(params, batch))
    times = []
    for _ in range(20):
        begun = time.perf_counter()
        jax.block_until_ready(gradient(params, batch))
        times.append(time.perf_counter() - begun)
    report = {
        "version": kfac_jax.__version__,
        "to step": spent,
        "losses": losses,
        "step": statistics.mean(seconds[20:]),
        "gradient": statistics.median(times),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
