"""The folder of a run: what it was begun with, its log and its checkpoints."""

import hashlib
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from natgrad._files import write_whole
from natgrad._optimiser.checkpoint import Checkpoints
from natgrad._problem import Problem

# What must be the same when a run is resumed, in words.
COMPARED = {
    "structure": "another structure",
    "seed": "another seed",
    "batch_size": "another size of batches",
    "data": "other data or initial parameters",
    "model": "another model or objective",
}


class Folder(NamedTuple):
    path: Path

    @property
    def settings(self) -> Path:
        return self.path / "run.json"

    @property
    def log(self) -> Path:
        return self.path / "log.jsonl"

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

    def start(self, settings: dict[str, Any], *, resume: bool) -> None:
        """Begin a run here, or make sure that this is the run to go on with."""
        if self.settings.exists() and not resume:
            raise ValueError(
                f"`{self.path}` holds a run already. Go on with it by `--resume`, or choose another folder by `--out`."
            )
        if not resume:
            write_whole(self.settings, json.dumps(settings, indent=2) + "\n")
        elif not self.settings.exists():
            raise ValueError(f"There is no run in `{self.path}` to resume. Leave out `--resume` to begin one.")
        else:
            before = self.read()
            changed = [text for name, text in COMPARED.items() if before.get(name) != settings[name]]
            if changed:
                raise ValueError(
                    f"The run in `{self.path}` was begun with {' and '.join(changed)}. Resume it as it was begun, or "
                    "begin another with another `--out`."
                )

    def read(self) -> dict[str, Any]:
        return json.loads(self.settings.read_text())

    def lines(self, until: int) -> list[dict[str, Any]]:
        """What the log says up to a step. A last line that was cut short does not count."""
        if not self.log.exists():
            return []
        found = []
        for line in self.log.read_text().splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                break
        return [line for line in found if line["step"] <= until]


def described(problem: Problem, name: str, structure: str, seed: int) -> dict[str, Any]:
    """What a run is begun with, data and model by their fingerprints."""
    jaxpr = str(jax.make_jaxpr(problem.loss)(problem.params, problem.batch(0, seed)))
    return {
        "natgrad": importlib.metadata.version("natgrad"),
        "problem": name,
        "structure": structure,
        "seed": seed,
        "batch_size": problem.batch_size,
        "data": fingerprint((problem.params, problem.data, problem.held_out)),
        # Addresses in memory are of one process only.
        "model": hashlib.sha256(re.sub(r"0x[0-9a-f]+", "", jaxpr).encode()).hexdigest(),
    }


def fingerprint(tree: Any) -> str:
    found = hashlib.sha256(str(jax.tree.structure(tree)).encode())
    for leaf in jax.tree.leaves(tree):
        array = np.ascontiguousarray(leaf)
        found.update(f"{array.dtype} {array.shape}".encode())
        found.update(array.tobytes())
    return found.hexdigest()
