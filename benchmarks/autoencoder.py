"""The optimiser on a reduced MNIST autoencoder, with nothing tuned, next to first-order methods and kfac-jax.

The net is 784-250-100-30-100-250-784 with tanh and a linear code, Haiku's initialisation with key 0, on the first 2,000
test images of MNIST in one batch. The loss is the mean over images of the cross-entropy summed over pixels, plus
1e-5/2 times the squared parameters; its floor, the entropy of the grey pixels, is 44.80. Single precision.

`NaturalGradient` has its defaults but for `batch_fraction`, the fraction of the batch on which the metric and the
quadratic model are measured. Adam, SGD with momentum 0.9 and Adadelta are swept over the learning rates that are
given, two to a decade, and the best at 500 steps is shown.

The cost of a step is the mean time of steps 20 to 40, refreshes of the inverses among them, over the median time of a
step of gradient descent that also returns its loss, interleaved; "fixed" has constant step size, momentum and damping.
Times to the first and to the eleventh completed step are from the first call, imports excluded, in a new process with
an empty cache.
The ratios of steps depend on what else is in the caches: with four optimisers interleaved instead of two, the same
program took 2.3 to 2.4 with everything adaptive and 1.9 to 2.0 fixed.
kfac-jax runs in its own environment as configured by its authors (damping from 150), from the same parameters."""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import scipy.linalg  # noqa: F401  JAX imports it when it first factors a matrix, and imports are excluded
from harness import Table, quantity

import natgrad as ng
from natgrad.problems.data import mnist_test_images

SIZES = (250, 100, 30, 100, 250, 784)
L2 = 1e-5
SHOWN = (10, 20, 50, 100, 150)
RATES = {"Adam": (3e-4, 1e-3, 3e-3, 1e-2), "SGD": (3e-4, 1e-3, 3e-3, 1e-2), "Adadelta": (0.3, 1.0, 3.0, 10.0)}
FIRST_ORDER: dict[str, Callable] = {
    "Adam": optax.adam,
    "SGD": lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
    "Adadelta": optax.adadelta,
}
PART = 1 / 8
ROOT = Path(__file__).parents[1]
PEER = ROOT / ".venv-kfac-jax" / "bin" / "python"


def images(count: int = 2000) -> jax.Array:
    return jnp.asarray(mnist_test_images()[:count])


def initial() -> list[tuple[jax.Array, jax.Array]]:
    def network(x):
        for k, size in enumerate(SIZES):
            x = hk.Linear(size)(x)
            x = x if k in (2, len(SIZES) - 1) else jnp.tanh(x)
        return x

    layers = hk.without_apply_rng(hk.transform(network)).init(jax.random.PRNGKey(0), jnp.zeros((1, 784)))
    return [(layer["w"], layer["b"]) for layer in layers.values()]


def model(params, x):
    for k, (w, b) in enumerate(params):
        x = x @ w + b
        x = x if k in (2, len(params) - 1) else jnp.tanh(x)
    return x


def loss(params, x):
    z = model(params, x)
    penalty = sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))
    return jnp.mean(jnp.sum(jax.nn.softplus(z) - x * z, axis=-1)) + L2 / 2 * penalty


def optimiser(batch_fraction: float, **options: Any) -> ng.NaturalGradient:
    structure = ng.KFAC(batch_fraction=batch_fraction)
    return ng.NaturalGradient(model, ng.Bernoulli(), structure, penalty=ng.L2(L2), **options)


def run(advance: Callable[[float], None]) -> Table:
    x, params = images(), initial()
    rows, remarks = [], []
    for part, name in ((1, "whole batch"), (PART, "an eighth of the batch for the metric")):
        rows.append(row(f"K-FAC, {name}", natural(optimiser(part), params, x)))
        advance(0.12)
    for name, make in FIRST_ORDER.items():
        losses = {rate: first_order(make(rate), params, x) for rate in RATES[name]}
        best = min(losses, key=lambda rate: losses[rate][500])
        rows.append(row(f"{name}, best rate {best:g} of {', '.join(f'{rate:g}' for rate in losses)}", losses[best]))
        advance(0.15)
    costs = step_costs(params, x)
    remarks.append(
        f"A step of K-FAC, an eighth of the batch for the metric, over a gradient step "
        f"({quantity(costs['gradient'], 's')}): {costs['adaptive'] / costs['gradient']:.2f} with everything adaptive, "
        f"{costs['fixed'] / costs['gradient']:.2f} fixed."
    )
    remarks.append(memory(optimiser(PART).init(params, (x, x))))
    advance(0.1)
    with tempfile.TemporaryDirectory() as folder:
        remarks += first_steps(Path(folder) / "start.npz", params, x, rows)
    advance(0.21)
    return Table(("method", *(f"step {k}" for k in SHOWN), "500"), rows, remarks)


def row(name: str, losses: dict[int, float]) -> tuple[str, ...]:
    return (name, *(f"{losses[k]:.1f}" if k in losses else "-" for k in (*SHOWN, 500)))


def natural(opt: ng.NaturalGradient, params: Any, x: jax.Array, steps: int = 151) -> dict[int, float]:
    """The loss after so many steps."""
    step, state, found = jax.jit(opt.step), opt.init(params, (x, x)), {}
    for number, key in enumerate(jax.random.split(jax.random.key(1), steps)):
        params, state, info = step(params, state, (x, x), key)
        found[number] = float(info.loss)
    return found


def first_order(transform: optax.GradientTransformation, params: Any, x: jax.Array) -> dict[int, float]:
    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    state, found = transform.init(params), {}
    for number in range(501):
        params, state, value = step(params, state)
        found[number] = float(value) if np.isfinite(value) else np.inf
    return found


def step_costs(params: Any, x: jax.Array) -> dict[str, float]:
    """Mean seconds a step over two periods of refreshing, and median seconds of a gradient step in between."""
    fixed = optimiser(PART, damping=ng.ConstantDamping(1.0), step=ng.ConstantStep(0.1), momentum=ng.HeavyBall(0.9))
    kinds = {"adaptive": optimiser(PART), "fixed": fixed}

    @jax.jit
    def descend(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, grads), value

    copied = lambda tree: jax.tree.map(jnp.array, tree)
    runs = {name: [copied(params), opt.init(params, (x, x))] for name, opt in kinds.items()}
    steps = {name: jax.jit(opt.step, donate_argnums=(0, 1)) for name, opt in kinds.items()}
    times: dict[str, list[float]] = {"gradient": [], **{name: [] for name in kinds}}
    for number in range(40):
        key = jax.random.key(number)
        for name, step in steps.items():
            start = time.perf_counter()
            moved, state, _ = step(*runs[name], (x, x), key)
            jax.block_until_ready(moved)
            times[name].append(time.perf_counter() - start)
            runs[name] = [moved, state]
        start = time.perf_counter()
        jax.block_until_ready(descend(params, x))
        times["gradient"].append(time.perf_counter() - start)
    means = {name: statistics.mean(times[name][20:]) for name in kinds}
    return {**means, "gradient": statistics.median(times["gradient"][20:])}


def memory(state: Any) -> str:
    """What the state takes, next to the formula: two of each factor and three vectors."""
    bytes_of = lambda tree: sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
    sizes = [(inputs + 1, outputs) for inputs, outputs in zip((784, *SIZES[:-1]), SIZES, strict=True)]
    factors = 4 * sum(2 * (a**2 + g**2) for a, g in sizes)
    vectors = 4 * sum(3 * a * g for a, g in sizes)
    return (
        f"The state takes {quantity(bytes_of(state), 'B')}: two of each factor and three vectors of parameters are "
        f"{quantity(factors + vectors, 'B')}."
    )


def first_steps(path: Path, params: Any, x: jax.Array, rows: list) -> list[str]:
    """From the first call to the first and the eleventh step, in new processes."""
    arrays: dict[str, Any] = {"x": x}
    for k, (w, b) in enumerate(params):
        arrays |= {f"w{k}": w, f"b{k}": b}
    np.savez(path, **arrays)
    own = _json([sys.executable, __file__, path])
    times = lambda report: ", ".join(f"{report['to step'][k]:.1f} s to step {k}" for k in ("1", "11"))
    remarks = [f"natgrad needs {times(own)}."]
    if not PEER.exists():
        return [*remarks, "kfac-jax was not measured: `make bench` installs it into an environment of its own."]
    peer = _json([PEER, ROOT / "benchmarks" / "peers" / "kfac_jax_autoencoder.py", path])
    rows.append(row("kfac-jax, as its authors configure it", {int(k): v for k, v in peer["losses"].items()}))
    ratios = ", ".join(f"{own['to step'][k] / peer['to step'][k]:.2f}" for k in ("1", "11"))
    remarks.append(
        f"kfac-jax {peer['version']} needs {times(peer)}; natgrad's times are {ratios} of these. Its mean step takes "
        f"{peer['step'] / peer['gradient']:.2f} of its gradient ({quantity(peer['gradient'], 's')})."
    )
    return remarks


def _json(command: list) -> dict:
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])


def main(path: str) -> None:
    """In a new process: time to the first and to the eleventh step."""
    with np.load(path) as arrays:
        x = jnp.asarray(arrays["x"])
        params = [(jnp.asarray(arrays[f"w{k}"]), jnp.asarray(arrays[f"b{k}"])) for k in range(len(SIZES))]
    jax.block_until_ready((x, params))
    start, spent = time.perf_counter(), {}
    opt = optimiser(PART)
    state, step, key = opt.init(params, (x, x)), jax.jit(opt.step), jax.random.key(1)
    for number in range(11):
        key, own = jax.random.split(key)
        params, state, _ = step(params, state, (x, x), own)
        jax.block_until_ready(params)
        if number + 1 in (1, 11):
            spent[str(number + 1)] = time.perf_counter() - start
    print(json.dumps({"to step": spent}))


if __name__ == "__main__":
    main(sys.argv[1])
