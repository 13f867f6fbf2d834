"""What pages show and the library computes, when the documentation is built: figures, and a table."""

from pathlib import Path

import jax

from natgrad import plots

ROOT = Path(__file__).parents[1]
TABLE = "<!-- steps to the minimum of the Rosenbrock function -->"

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def on_pre_build(config) -> None:
    plots.save_figures([], Path(config.docs_dir) / "figures", formats=("svg",))


def on_page_markdown(markdown: str, **_) -> str:
    if TABLE not in markdown:
        return markdown
    rows = "\n".join(f"| {name} | {steps:,} |" for name, steps in plots.rosenbrock_steps())
    return markdown.replace(TABLE, f"| method | steps to a cost below 1e-8 |\n| --- | ---: |\n{rows}")
