"""What every test run shares: a compilation cache, and the code blocks of the pages as tests."""

import gc
import os
from pathlib import Path

# Nearly all the time of the tests is compilation, and the code is run once: a third is saved by not optimising it,
# and a third of the rest by the older code generator. The runs of the Makefile with `XLA_FLAGS=` compile as users do.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_use_fusion_emitters=false",
)

# JAX 0.10.1 prints two lines of CPU features for every program it takes from the cache.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

jax.config.update("jax_compilation_cache_dir", str(Path(__file__).parent / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
# A tenth of the time went into writing the lines of Python into every program.
jax.config.update("jax_traceback_in_locations_limit", 0)

os.environ["MPLBACKEND"] = "Agg"

# Tracing makes many objects, and looking through all of them for cycles took a seventh of the time.
gc.set_threshold(200_000, 50, 20)


@pytest.fixture(scope="module")
def scratch_directory(tmp_path_factory):
    """Pages run in a directory of their own, so that they leave no files behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        yield


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "docs/*.md", "docs/**/*.md"],
    fixtures=["scratch_directory"],
).pytest()
