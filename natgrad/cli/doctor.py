import importlib.metadata
import os
import platform
import shutil
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import natgrad as ng
from natgrad.cli import options
from natgrad.cli.failure import Failure, reported

EXAMPLES = "Example: `natgrad doctor`"

NEEDED = ("natgrad", "jax", "jaxlib", "equinox", "lineax", "optimistix", "optax", "numpy", "scipy")
OPTIONAL = {
    "matplotlib": "plots",
    "plotly": "cli",
    "rich": "cli",
    "typer": "cli",
    "scikit-learn": "data",
    "tensorboardX": "tensorboard",
    "orbax-checkpoint": "distributed",
}


class Check(NamedTuple):
    """A computation whose answer is known: how far off it is, and how far it may be."""

    name: str
    error: float
    tolerance: float

    @property
    def is_passed(self) -> bool:
        return self.error <= self.tolerance


@reported
def doctor(quiet: options.Quiet = False, debug: options.Debug = False) -> None:
    """Say which versions, devices and precision natgrad works with here, and test it on small problems.

    Ends with exit code 1 if a test fails."""
    del debug
    tell: Callable[[str], None] = (lambda text: None) if quiet else print
    tell(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} processors")
    for name in NEEDED:
        tell(f"  {name:18}{importlib.metadata.version(name)}")
    for name, extra in OPTIONAL.items():
        tell(f"  {name:18}{_version(name) or f'missing: pip install natgrad[{extra}]'}")
    devices = jax.devices()
    tell(f"Devices: {len(devices)} x {devices[0].device_kind} ({jax.default_backend()})")
    tell(f"Precision: {'double' if jax.config.read('jax_enable_x64') else 'single'} by default")
    free = shutil.disk_usage(".").free
    tell(f"Disk: {free / 1e9:.0f} GB free here")
    tell("Tests:")
    failed = 0
    for precision in ("single", "double"):
        with jax.enable_x64(precision == "double"):
            start = time.perf_counter()
            for check in checks():
                failed += not check.is_passed
                mark = "ok" if check.is_passed else "FAILED"
                tell(f"  {mark:7}{precision}: {check.name} (off by {check.error:.1e})")
            tell(f"  {time.perf_counter() - start:.1f} s")
    if failed:
        raise Failure(f"{failed} of the tests failed. Results of natgrad cannot be trusted here.")
    tell("All is well.")


def checks() -> list[Check]:
    """Identities on a small network, against dense matrices made by JAX alone."""
    x = jax.random.normal(jax.random.key(0), (8, 3))
    params = {"w": jax.random.normal(jax.random.key(1), (3, 4)), "b": jnp.zeros(4)}
    model = lambda params, x: jnp.tanh(x @ params["w"] + params["b"])
    metric = ng.pullback(model, ng.Euclidean(), params, x)
    flat, unflatten = ravel_pytree(params)
    jacobian = np.asarray(jax.jacobian(lambda flat: model(unflatten(flat), x).reshape(-1))(flat), float)
    dense = jacobian.T @ jacobian / len(x)
    gradient = jax.grad(lambda params: jnp.sum(model(params, x)))(params)
    covector = np.asarray(ravel_pytree(gradient)[0], float)
    solved = ravel_pytree(ng.solve(metric, gradient, damping=0.1).value)[0]
    rounding = 1e3 * float(jnp.finfo(flat.dtype).eps)
    exact = np.linalg.solve(dense + 0.1 * np.eye(len(dense)), covector)
    factored = ng.kfac(model, ng.Euclidean(), params, x[:1]).as_matrix()
    single = ng.pullback(model, ng.Euclidean(), params, x[:1]).as_matrix()
    return [
        Check("the metric is that of the Jacobian", _off(metric.as_matrix(), dense), rounding),
        Check("a damped solve", _off(solved, exact), 100 * rounding),
        Check("Kronecker factors are exact for one example", _off(factored, single), rounding),
    ]


def _off(found: object, expected: object) -> float:
    a, b = np.asarray(found, float), np.asarray(expected, float)
    difference = np.linalg.norm(a - b) / np.linalg.norm(b)
    return float(difference) if np.isfinite(difference) else float("inf")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
