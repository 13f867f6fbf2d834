"""The optimiser with nothing tuned, against Adam with its learning rate swept.

Adam runs with the rates 1e-3, 3e-3 and so on up to 0.1 from the first seed; the one that reaches the lowest training
loss then runs from three seeds. Its lowest loss is the target, and "to it" is how many steps each method takes to reach
it, with its range over the seeds, and how many seconds, compilation (that of natgrad is given) and evaluation excluded.
"After as many" is the loss of natgrad after as many steps as Adam had in all. Losses are those of a fixed part of the
training data, looked at every few steps. Single precision.

natgrad is `NaturalGradient(model, objective)` where the batch is all there is (regression, autoencoder), and
`NaturalGradient(model, objective, step=CrossValidated())` where batches are small. The problems:
perceptrons with two hidden layers on the digits of scikit-learn (64-64-32-10, batches of 128) and on its diabetes data
(10-32-32-1); the autoencoder of the next section without `l2`; two convolutions with stride and a linear layer on MNIST
(14 × 14, batches of 256); a causal transformer with two layers of width 64 on Python's reference manual (32 characters,
batches of 64).

The defaults of `CrossValidated` (its formula, `patience` and `radius`) were chosen from about a dozen variants by their
losses on the first seed of the three problems with small batches here. For those rows "untuned" means that nothing was
set for one problem alone, not that the problems were unseen; Adam got a learning rate for each. Those for whole
batches were developed on the same autoencoder from other initial parameters, and not on the regression."""

import functools
import pydoc_data.topics
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from harness import Table, quantity
from networks import decoder
from sklearn.datasets import load_diabetes, load_digits

import natgrad as ng
from natgrad.problems.data import in_numbers, mnist_test_images, mnist_test_labels

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 0.1)
SEEDS = (0, 1, 2)


class Problem(NamedTuple):
    """A model, how to draw its parameters, its loss and data, and how long to train on batches of which size."""

    model: Callable
    initial: Callable
    objective: Any
    data: tuple[jax.Array, jax.Array]
    batch: int | None
    steps: int
    every: int
    # How many examples the loss is looked at on.
    shown: int = 2000

    def loss(self, params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        z = self.model(params, x)
        if isinstance(self.objective, ng.LeastSquares):
            return jnp.mean(jnp.sum((z - y) ** 2, axis=-1)) / 2
        return -jnp.mean(jnp.sum(jax.vmap(self.objective.log_prob)(z, y).reshape(len(z), -1), axis=1))

    def batches(self, seed: int) -> Iterator[tuple[jax.Array, jax.Array]]:
        rng, (x, y) = np.random.default_rng(seed), self.data
        for _ in range(self.steps):
            if self.batch is None:
                yield x, y
            else:
                chosen = rng.choice(len(x), self.batch, replace=False)
                yield x[chosen], y[chosen]


class Run(NamedTuple):
    """Losses after so many steps, and the mean seconds of a step, the slowest aside."""

    losses: dict[int, float]
    seconds: float

    @property
    def best(self) -> float:
        return min(self.losses.values())

    def steps_to(self, loss: float) -> int | None:
        return next((steps for steps, value in self.losses.items() if value <= loss), None)


def layer(key: jax.Array, inputs: int, outputs: int) -> dict[str, jax.Array]:
    return {"w": jax.random.normal(key, (inputs, outputs)) / inputs**0.5, "b": jnp.zeros(outputs)}


def affine(layer: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    return x @ layer["w"] + layer["b"]


def perceptron(sizes: tuple[int, ...], linear: tuple[int, ...] = ()) -> tuple[Callable, Callable]:
    """Layers with tanh between them, except after those that are linear."""
    pairs = list(zip(sizes[:-1], sizes[1:], strict=True))

    def model(params, x):
        for number, each in enumerate(params):
            x = affine(each, x)
            x = x if number in (*linear, len(pairs) - 1) else jnp.tanh(x)
        return x

    def initial(key):
        return [layer(own, *pair) for own, pair in zip(jax.random.split(key, len(pairs)), pairs, strict=True)]

    return model, initial


def digits() -> Problem:
    x, y = load_digits(return_X_y=True)
    data = jnp.asarray(x / 16, jnp.float32), jnp.asarray(y)
    return Problem(*perceptron((64, 64, 32, 10)), ng.Categorical(), data, 128, 500, 5)


def regression() -> Problem:
    x, y = map(np.asarray, load_diabetes(return_X_y=True))
    scaled = lambda values: jnp.asarray((values - values.mean(0)) / values.std(0), jnp.float32)
    data = scaled(x), scaled(y[:, None])
    return Problem(*perceptron((10, 32, 32, 1)), ng.LeastSquares(), data, None, 1000, 5)


def autoencoder() -> Problem:
    x = jnp.asarray(mnist_test_images()[:2000])
    network = perceptron((784, 250, 100, 30, 100, 250, 784), linear=(2,))
    return Problem(*network, ng.Bernoulli(), (x, x), None, 300, 5)


def convolutional() -> Problem:
    images = mnist_test_images().reshape(-1, 14, 2, 14, 2).mean((2, 4))[..., None]

    def convolve(each, x):
        y = jax.lax.conv_general_dilated(x, each["w"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jax.nn.relu(y + each["b"])

    def kernel(key, inputs, outputs):
        return {"w": jax.random.normal(key, (3, 3, inputs, outputs)) / (9 * inputs) ** 0.5, "b": jnp.zeros(outputs)}

    def initial(key):
        first, second, last = jax.random.split(key, 3)
        return {"first": kernel(first, 1, 8), "second": kernel(second, 8, 16), "last": layer(last, 256, 10)}

    def model(params, x):
        hidden = convolve(params["second"], convolve(params["first"], x))
        return affine(params["last"], hidden.reshape(len(x), -1))

    data = jnp.asarray(images), jnp.asarray(mnist_test_labels())
    return Problem(model, initial, ng.Categorical(), data, 256, 500, 5)


def transformer() -> Problem:
    text, count = in_numbers("".join(pydoc_data.topics.topics.values())[:200_000])
    rows = jnp.asarray(text[: len(text) // 33 * 33].reshape(-1, 33))
    network = functools.partial(decoder, layers=2, width=64, positions=32, words=count)
    initial = lambda key: network(key=key).params
    return Problem(network().model, initial, ng.Categorical(), (rows[:, :-1], rows[:, 1:]), 64, 300, 10, shown=512)


PROBLEMS = {
    "digits": digits,
    "regression": regression,
    "convolutional net": convolutional,
    "transformer": transformer,
    "autoencoder": autoencoder,
}


def run(advance: Callable[[float], None]) -> Table:
    rows, remarks = [], []
    for name, make in PROBLEMS.items():
        problem = make()
        train = functools.partial(trained, problem, evaluated(problem))
        sweep = {rate: train(*adam(problem, rate), seed=0) for rate in RATES}
        rate = min(sweep, key=lambda rate: sweep[rate].best)
        if rate in (RATES[0], RATES[-1]):
            remarks.append(f"The best rate of Adam on {name} is the last of the sweep.")
        advance(0.1)
        own, spent = natural(problem)
        step = adam(problem, rate)
        theirs = [sweep[rate], *(train(*step, seed=seed) for seed in SEEDS[1:])]
        ours = [train(*own, seed=seed) for seed in SEEDS]
        rows.append(row(name, rate, theirs, ours, spent, problem))
        advance(0.1)
    columns = "problem", "best rate", "its loss", "Adam to it", "natgrad to it", "after as many", "compilation"
    return Table(columns, rows, remarks)


def row(name: str, rate: float, theirs: list[Run], ours: list[Run], spent: float, problem: Problem) -> tuple[str, ...]:
    targets = [run.best for run in theirs]
    last = [run.losses[problem.steps] for run in ours]
    return (
        name,
        f"{rate:g}",
        f"{statistics.median(targets):.3g}",
        reached(theirs, targets, problem),
        reached(ours, targets, problem),
        f"{statistics.median(last):.3g}",
        quantity(spent, "s"),
    )


def reached(runs: list[Run], targets: list[float], problem: Problem) -> str:
    steps = [run.steps_to(target) for run, target in zip(runs, targets, strict=True)]
    found = [each for each in steps if each is not None]
    if len(found) < len(runs):
        return f"{len(found)} of {len(runs)} seeds in {problem.steps}"
    median = statistics.median(found)
    seconds = statistics.median(run.seconds for run in runs)
    return f"{median:g} ({min(found)}-{max(found)}), {quantity(median * seconds, 's')}"


def adam(problem: Problem, rate: float) -> tuple[Callable, Callable]:
    transform = optax.adam(rate)

    @jax.jit
    def step(params, state, batch, key):
        del key
        updates, state = transform.update(jax.grad(problem.loss)(params, *batch), state, params)
        return optax.apply_updates(params, updates), state

    return lambda params, batch: transform.init(params), step


def natural(problem: Problem) -> tuple[tuple[Callable, Callable], float]:
    """How to start and how to step, compiled, and how long that took."""
    rule = ng.QuadraticModel() if problem.batch is None else ng.CrossValidated()
    opt = ng.NaturalGradient(problem.model, problem.objective, step=rule)
    params, batch, key = problem.initial(jax.random.key(0)), next(problem.batches(0)), jax.random.key(0)
    start = time.perf_counter()
    compiled = jax.jit(opt.step).lower(params, opt.init(params, batch), batch, key).compile()
    spent = time.perf_counter() - start
    return (opt.init, lambda *arguments: compiled(*arguments)[:2]), spent


def trained(problem: Problem, loss: Callable, init: Callable, step: Callable, seed: int) -> Run:
    params = problem.initial(jax.random.key(seed))
    state = init(params, next(problem.batches(seed)))
    losses, times = {}, []
    keys = jax.random.split(jax.random.key(seed), problem.steps)
    for number, (batch, key) in enumerate(zip(problem.batches(seed), keys, strict=True), 1):
        jax.block_until_ready((batch, key))
        start = time.perf_counter()
        params, state = step(params, state, batch, key)
        jax.block_until_ready(params)
        times.append(time.perf_counter() - start)
        if number % problem.every == 0:
            value = loss(params)
            losses[number] = value if np.isfinite(value) else np.inf
    return Run(losses, statistics.mean(sorted(times)[: -len(times) // 50]))


def evaluated(problem: Problem) -> Callable[[Any], float]:
    x, y = problem.data
    compiled = jax.jit(problem.loss)
    return lambda params: float(compiled(params, x[: problem.shown], y[: problem.shown]))
