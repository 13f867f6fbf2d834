"""What the Fisher geometry of a softmax costs as the number of classes grows.

`metric_mv` is the product of `Fisher(Categorical())` with one tangent vector, `to_moments` gives the probabilities
after a check that the logits are finite, and `softmax` is `jax.nn.softmax` on its own, for scale. All are compiled, in
single precision, on one vector of K logits. A product through the matrix of K² entries would have slope 2.

The times are noisy: six runs on a shared machine gave 2.7 to 5.2 for `metric_mv` over `softmax` at K = 1,000,000, and
0.85 to 1.04 for the slope of its time. The counts were the same each time, and are what shows that the cost is linear.
"""

from collections.abc import Callable

import jax
from harness import Cost, Program, Table, measure, quantity, slope

import natgrad as ng

SIZES = (10**2, 10**3, 10**4, 10**5, 10**6)
# Below this size a call costs mostly its dispatch.
BUSY = 10**4


def programs(num_classes: int) -> dict[str, Program]:
    z_key, v_key = jax.random.split(jax.random.key(0))
    z, v = jax.random.normal(z_key, (num_classes,)), jax.random.normal(v_key, (num_classes,))
    return {
        "metric_mv": Program(ng.Fisher(ng.Categorical()).metric_mv, (z, v)),
        "to_moments": Program(ng.Categorical().to_moments, (z,)),
        "softmax": Program(jax.nn.softmax, (z,)),
    }


def run(advance: Callable[[float], None], sizes: tuple[int, ...] = SIZES) -> Table:
    costs = {}
    for size in sizes:
        costs[size] = measure(programs(size))
        advance(1 / len(sizes))
    names = list(costs[sizes[0]])
    rows = [row(name, size, costs[size]) for name in names for size in sizes]
    fitted = [f"- `{name}`: {slopes(name, costs)}" for name in names]
    return Table(
        ("operation", "K", "time", "quartiles", "time / softmax", "flops / K", "bytes / K", "temporary / K", "compile"),
        rows,
        ["Slopes of the logarithm of each cost against the logarithm of K:", "\n".join(fitted)],
    )


def row(name: str, size: int, costs: dict[str, Cost]) -> tuple[str, ...]:
    cost = costs[name]
    return (
        f"`{name}`",
        f"{size:,}",
        quantity(cost.seconds, "s"),
        " – ".join(quantity(seconds, "s") for seconds in cost.quartiles),
        f"{cost.seconds / costs['softmax'].seconds:.2f}",
        f"{cost.flops / size:.1f}",
        f"{cost.bytes_accessed / size:.0f}",
        f"{cost.temporary_bytes / size:.1f}",
        quantity(cost.compile_seconds, "s"),
    )


def slopes(name: str, costs: dict[int, dict[str, Cost]]) -> str:
    busy = [size for size in costs if size >= BUSY] or list(costs)
    seconds = slope(busy, [costs[size][name].seconds for size in busy])
    flops = slope(list(costs), [cost[name].flops for cost in costs.values()])
    moved = slope(list(costs), [cost[name].bytes_accessed for cost in costs.values()])
    return f"flops {flops:.2f}, bytes {moved:.2f}, time {seconds:.2f} (from K = {min(busy):,} on)"
