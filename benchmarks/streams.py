"""Learning from streams: maximum likelihood of ten million examples, and filters for the parameters of a network.

The first rows fit a Gaussian in four dimensions, in single precision, to examples that are made in batches and thrown
away. Peak memory is that of the process, whose growth from a tenth of the examples to all of them is what a stream may
not cost; the error is that of the natural parameters from those of all examples in double precision, relative.

The others take one step of `OnlineNaturalGradient` on one example for a perceptron with tanh, of least squares, next to
one step of gradient descent: interleaved, with XLA's own counts."""

import resource
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from harness import Program, Table, measure, quantity
from networks import tanh_perceptron

import natgrad as ng

EXAMPLES = 10_000_000
BATCH = 100_000
SIZES = (10, 32, 32, 1)
STRUCTURES = {
    "dense": ng.DensePrecision(),
    "low rank, 10": ng.LowRankPrecision(10),
    "diagonal": ng.DiagonalPrecision(),
}


def run(advance: Callable[[float], None]) -> Table:
    rows = [*maximum_likelihood(advance), *filters()]
    advance(0.2)
    return Table(("what", "time", "next to", "flops", "temporary", "peak memory", "error"), rows)


def batches(count: int) -> Iterator[np.ndarray]:
    random = np.random.default_rng(0)
    for _ in range(count // BATCH):
        yield (random.standard_normal((BATCH, 4)) @ mixing() + 3.0).astype(np.float32)


def mixing() -> np.ndarray:
    return np.array([[1.0, 0.5, 0.0, 0.2], [0.0, 0.7, 0.3, 0.0], [0.0, 0.0, 1.5, 0.4], [0.0, 0.0, 0.0, 0.3]])


def maximum_likelihood(advance: Callable[[float], None]) -> Iterator[tuple[str, ...]]:
    online = ng.OnlineMaximumLikelihood(ng.Gaussian(4))
    for count in (EXAMPLES // 10, EXAMPLES):
        state = online.init(jnp.zeros(4))
        start = time.perf_counter()
        state = jax.block_until_ready(online.update_all(state, batches(count)))
        spent = time.perf_counter() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        error = distance(online.natural(state), exact(count))
        name = f"maximum likelihood, {count:,} examples"
        yield name, quantity(spent, "s"), "-", "-", "-", quantity(peak, "B"), f"{error:.0e}"
        advance(0.4)


def exact(count: int) -> tuple[np.ndarray, np.ndarray]:
    """The natural parameters of the estimate, in double precision."""
    total, second = np.zeros(4), np.zeros((4, 4))
    for batch in batches(count):
        wide = batch.astype(np.float64)
        total += wide.sum(axis=0)
        second += wide.T @ wide
    mean = total / count
    precision = np.linalg.inv(second / count - np.outer(mean, mean))
    return precision @ mean, precision


def distance(found: tuple, expected: tuple) -> float:
    flat = lambda pair: np.concatenate([np.ravel(np.asarray(part, np.float64)) for part in pair])
    return float(np.linalg.norm(flat(found) - flat(expected)) / np.linalg.norm(flat(expected)))


def filters() -> Iterator[tuple[str, ...]]:
    network, params = tanh_perceptron(SIZES)
    batch = jnp.ones((1, SIZES[0])), jnp.ones((1, 1))

    def descend(params, batch):
        loss = lambda params: jnp.sum((network(params, batch[0]) - batch[1]) ** 2) / 2
        return jax.tree.map(lambda w, g: w - 1e-3 * g, params, jax.grad(loss)(params))

    programs = {"gradient descent": Program(descend, (params, batch))}
    for name, structure in STRUCTURES.items():
        opt = ng.OnlineNaturalGradient(network, ng.LeastSquares(), precision=structure)
        programs[name] = Program(opt.step, (params, opt.init(params), batch))
    costs = measure(programs)
    base = costs["gradient descent"]
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    for name, cost in costs.items():
        ratio = f"{cost.seconds / base.seconds:.1f} gradients"
        label, memory = f"a step with {size:,} parameters, {name}", quantity(cost.temporary_bytes, "B")
        yield label, quantity(cost.seconds, "s"), ratio, quantity(cost.flops, "flop"), memory, "-", "-"
