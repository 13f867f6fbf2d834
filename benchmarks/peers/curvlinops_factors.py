"""What the factors of curvlinops and their inverses cost, next to a gradient in the same PyTorch.

Runs in an environment of its own, made from `requirements/peers.txt`, and prints JSON. The perceptron is
784-1000-1000-10 with ReLU on a batch of 512 in single precision. `factors` is `KFACLinearOperator` with one sampled
label an example and a bias that is joined to its weight, `inverses` those of its factors with factored damping."""

# pyright: reportMissingImports=false

import json
import statistics
import time
import warnings
from importlib.metadata import version

import torch
from curvlinops import KFACInverseLinearOperator, KFACLinearOperator
from torch import nn

REPEATS = 15


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    hidden = nn.Linear(784, 1000), nn.ReLU(), nn.Linear(1000, 1000), nn.ReLU()
    model, loss = nn.Sequential(*hidden, nn.Linear(1000, 10)), nn.CrossEntropyLoss()
    x, y = torch.randn(512, 784), torch.randint(10, (512,))
    params = list(model.parameters())

    def gradient():
        model.zero_grad()
        loss(model(x), y).backward()

    def factors():
        operator = KFACLinearOperator(
            model, loss, params, [(x, y)], check_deterministic=False, separate_weight_and_bias=False
        )
        operator.compute_kronecker_factors()
        return operator

    known = factors()

    def inverses():
        inverse = KFACInverseLinearOperator(known, damping=(1e-3, 1e-3))
        # Inverses are computed when they are first needed, so each is asked for once.
        return inverse @ [torch.zeros_like(p) for p in params]

    programs = {"gradient": gradient, "factors": factors, "inverses": inverses}
    times: dict[str, list[float]] = {name: [] for name in programs}
    for repeat in range(REPEATS + 1):
        for name, call in programs.items():
            start = time.perf_counter()
            call()
            if repeat:
                times[name].append(time.perf_counter() - start)
    seconds = {name: statistics.median(own) for name, own in times.items()}
    ratios = {name: seconds[name] / seconds["gradient"] for name in ("factors", "inverses")}
    print(json.dumps({"seconds": seconds, "ratios": ratios, "version": version("curvlinops-for-pytorch")}))


if __name__ == "__main__":
    main()
