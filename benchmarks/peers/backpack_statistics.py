"""What the statistics of BackPACK cost, next to a gradient in the same PyTorch.

Runs in an environment of its own, made from `requirements/peers.txt`, and prints JSON. Every figure covers the forward
pass, the mean cross-entropy of ten classes and the backward pass, which with an extension yields the gradient too.
`gradient` is a model that BackPACK has not touched. Single precision, on CPU, with random inputs and labels.

The perceptron is 784-1000-1000-10 with ReLU on a batch of 512. The convolutional network takes images of 28 × 28 with
one channel in a batch of 128 through 3 × 3 convolutions to 16 and 32 channels, padded to keep the size, each followed
by ReLU and a 2 × 2 max-pool, and ends in a linear layer.

Repeats are interleaved, and ratios are those of medians from one run. `extra_resident_bytes` is by how much one call
in a fresh process raises the peak of resident memory above that of `gradient` in another. It comes from one pair of
processes, so small differences mean nothing, and may be negative.
"""

# pyright: reportMissingImports=false

import json
import os
import resource
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib.metadata import version
from typing import Any, NamedTuple

import torch
from backpack import backpack, extend
from backpack.extensions import BatchL2Grad, DiagGGNExact, DiagGGNMC, SumGradSquared
from torch import nn

REPEATS = 15
CLASSES = 10
GRADIENT = "gradient"

EXTENSIONS: dict[str, Callable[[], Any]] = {
    "SumGradSquared": SumGradSquared,
    "DiagGGNMC": lambda: DiagGGNMC(mc_samples=1),
    "BatchL2Grad": BatchL2Grad,
    "DiagGGNExact": DiagGGNExact,
}


class Case(NamedTuple):
    """A model, and the shape of the batch it is measured on."""

    model: Callable[[], nn.Sequential]
    shape: tuple[int, ...]


def perceptron() -> nn.Sequential:
    hidden = nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU()
    return nn.Sequential(*hidden, nn.Linear(1000, CLASSES))


def convolutional() -> nn.Sequential:
    first = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    second = nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(32 * 7 * 7, CLASSES))


CASES = {"perceptron": Case(perceptron, (512, 784)), "convolutional": Case(convolutional, (128, 1, 28, 28))}


def main(arguments: list[str]) -> None:
    # The first layer's input is data; BackPACK's hooks do not need its gradient.
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    if arguments:
        print(peak_after_one_call(*arguments))
        return
    load = os.getloadavg()[0]
    # Memory comes first: a child's peak starts at the resident size of its parent, which must therefore be small.
    extra = {case: extra_resident_bytes(case) for case in CASES}
    report = {
        "torch": torch.__version__,
        "backpack": version("backpack-for-pytorch"),
        "threads": torch.get_num_threads(),
        "load": load,
        "results": {case: measure(case, extra[case]) for case in CASES},
    }
    print(json.dumps(report, indent=2))


def program(case: str, name: str) -> Callable[[], None]:
    """One call leaves the gradient, and what the extension computes, on the parameters of a model of its own."""
    torch.manual_seed(0)
    model, loss = CASES[case].model(), nn.CrossEntropyLoss()
    inputs = torch.randn(CASES[case].shape)
    labels = torch.randint(CLASSES, inputs.shape[:1])
    context: Callable[[], Any] = nullcontext
    if name != GRADIENT:
        model, loss = extend(model), extend(loss)
        context = lambda: backpack(EXTENSIONS[name]())

    def call() -> None:
        model.zero_grad()
        with context():
            loss(model(inputs), labels).backward()

    return call


def measure(case: str, extra: dict[str, int]) -> dict[str, dict[str, Any]]:
    """Times of the gradient and of each extension, with their repeats interleaved."""
    times = interleaved_times({name: program(case, name) for name in (GRADIENT, *EXTENSIONS)})
    summaries = {name: median_and_quartiles(spent) for name, spent in times.items()}
    return {
        name: {
            "seconds": seconds,
            "quartiles": quartiles,
            "ratio": seconds / summaries[GRADIENT][0],
            "extra_resident_bytes": extra.get(name),
        }
        for name, (seconds, quartiles) in summaries.items()
    }


def interleaved_times(programs: dict[str, Callable[[], None]]) -> dict[str, list[float]]:
    """Seconds a call, where every repeat times each program once before any is timed again."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(REPEATS):
        for name, call in programs.items():
            times[name].append(time_call(call))
    return times


def time_call(call: Callable[[], None]) -> float:
    """Seconds of one call, after one that warms up."""
    call()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_and_quartiles(times: Sequence[float]) -> tuple[float, tuple[float, float]]:
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return median, (lower, upper)


def extra_resident_bytes(case: str) -> dict[str, int]:
    """Peak resident memory of each extension less that of the gradient, each in a process of its own."""
    peaks = {name: peak_in_fresh_process(case, name) for name in (GRADIENT, *EXTENSIONS)}
    return {name: peaks[name] - peaks[GRADIENT] for name in EXTENSIONS}


def peak_in_fresh_process(case: str, name: str) -> int:
    command = [sys.executable, __file__, case, name]
    return int(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)


def peak_after_one_call(case: str, name: str) -> int:
    """Peak resident bytes of this process; Linux counts them in units of 1024."""
    program(case, name)()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main(sys.argv[1:])
