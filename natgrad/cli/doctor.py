"""`natgrad doctor`: versions, devices and precision, and tests of natgrad against dense matrices of NumPy."""

import importlib.metadata
import os
import platform
import shutil
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import natgrad as ng
from natgrad import _backend
from natgrad.cli import options
from natgrad.cli.ending import Failure, report_errors

EXAMPLES = "Example: `natgrad doctor`"

NEEDED = ("natgrad", "jax", "jaxlib", "equinox", "lineax", "optimistix", "optax", "numpy", "scipy")
# Optional packages, each with the extra that installs it.
OPTIONAL = {
    "matplotlib": "plots",
    "plotly": "cli",
    "rich": "cli",
    "typer": "cli",
    "scikit-learn": "data",
    "tensorboardX": "tensorboard",
    "orbax-checkpoint": "distributed",
}

NUM_EXAMPLES, DAMPING = 8, 0.1


class Check(NamedTuple):
    """A computation whose result is known: its relative error, and the error that rounding may cause."""

    name: str
    error: float
    tolerance: float

    @property
    def is_passed(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        return f"{'ok' if self.is_passed else 'FAILED':7}{self.name} (relative error {self.error:.1e})"


@report_errors
def doctor(quiet: options.Quiet = False, debug: options.Debug = False) -> None:
    """Print versions, devices and precision, and test natgrad on small problems with a known result.

    Exits with code 1 if a test fails."""
    del debug
    tell = _print_nothing if quiet else print
    tell(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} processors")
    for name in NEEDED:
        tell(f"  {name:18}{importlib.metadata.version(name)}")
    for name, extra in OPTIONAL.items():
        tell(f"  {name:18}{_version(name) or f'missing: pip install natgrad[{extra}]'}")
    devices = jax.devices()
    tell(f"Devices: {len(devices)} x {devices[0].device_kind} ({jax.default_backend()})")
    tell(f"Precision: {'double' if jax.config.read('jax_enable_x64') else 'single'} by default")
    free = shutil.disk_usage(".").free
    tell(f"Disk: {free / 1e9:.0f} GB free in this folder")
    tell("Tests:")
    # First, because natgrad itself refuses to run with a broken compiler.
    compiler = Check("compiled programs agree with NumPy", _backend.error_of(jax.default_backend()), _backend.TOLERANCE)
    tell(f"  {compiler}")
    if not compiler.is_passed:
        # Raises, with the remedy: the other tests would fail for the same reason.
        _backend.require_sound()
    failed = 0
    for precision in ("single", "double"):
        with jax.enable_x64(precision == "double"):
            start = time.perf_counter()
            for check in checks():
                failed += not check.is_passed
                tell(f"  {check} in {precision} precision")
            tell(f"  {time.perf_counter() - start:.1f} s")
    if failed:
        raise Failure(f"{failed} of the tests failed: results of natgrad on this computer cannot be trusted.")
    tell("All tests passed.")


def _print_nothing(text: str) -> None:
    del text


def checks() -> list[Check]:
    """Test natgrad on a small network against dense matrices computed with JAX and NumPy alone."""
    values = {name: np.asarray(value, float) for name, value in jax.jit(_quantities)().items()}
    dense = values["jacobian"].T @ values["jacobian"] / NUM_EXAMPLES
    solved = np.linalg.solve(dense + DAMPING * np.eye(len(dense)), values["gradient"])
    rounding = 1e3 * float(jnp.finfo(jnp.zeros(()).dtype).eps)
    return [
        Check("the metric is J'J of the dense Jacobian J", _relative_error(values["metric"], dense), rounding),
        Check("a damped solve agrees with NumPy", _relative_error(values["solved"], solved), 100 * rounding),
        Check("K-FAC is exact for one example", _relative_error(values["factored"], values["single"]), rounding),
    ]


def _quantities() -> dict[str, jax.Array]:
    """Arrays of natgrad and of JAX alone, in one compiled program: many small ones take longer to compile."""
    x = jax.random.normal(jax.random.key(0), (NUM_EXAMPLES, 3))
    params = {"w": jax.random.normal(jax.random.key(1), (3, 4)), "b": jnp.zeros(4)}

    def model(params, x):
        return jnp.tanh(x @ params["w"] + params["b"])

    flat, unflatten = ravel_pytree(params)
    metric = ng.pullback(model, ng.Euclidean(), params, x)
    gradient = jax.grad(lambda params: jnp.sum(model(params, x)))(params)
    return {
        "jacobian": jax.jacobian(lambda flat: model(unflatten(flat), x).reshape(-1))(flat),
        "gradient": ravel_pytree(gradient)[0],
        "metric": metric.as_matrix(),
        "solved": ravel_pytree(ng.solve(metric, gradient, damping=DAMPING).value)[0],
        "factored": ng.kfac(model, ng.Euclidean(), params, x[:1]).as_matrix(),
        "single": ng.pullback(model, ng.Euclidean(), params, x[:1]).as_matrix(),
    }


def _relative_error(value: np.ndarray, expected: np.ndarray) -> float:
    error = np.linalg.norm(value - expected) / np.linalg.norm(expected)
    return float(error) if np.isfinite(error) else float("inf")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
