"""What pages show and the library computes, when the documentation is built: figures, and a table."""

import json
from collections.abc import Iterator
from pathlib import Path

import jax

from natgrad import plots

ROOT = Path(__file__).parents[1]
TABLE = "<!-- steps to the minimum of the Rosenbrock function -->"
FIELDS = "<!-- fields of report.json -->"

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".cache" / "jax"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def on_pre_build(config) -> None:
    plots.save_figures([], Path(config.docs_dir) / "figures", formats=("svg",))


def on_page_markdown(markdown: str, **_) -> str:
    for marker, table in ((TABLE, steps_table), (FIELDS, fields_table)):
        if marker in markdown:
            markdown = markdown.replace(marker, table())
    return markdown


def steps_table() -> str:
    rows = "\n".join(f"| {name} | {steps:,} |" for name, steps in plots.rosenbrock_steps())
    return f"| method | steps to a cost below 1e-8 |\n| --- | ---: |\n{rows}"


def fields_table() -> str:
    schema = json.loads((ROOT / "natgrad" / "report" / "schema.json").read_text())
    rows = "\n".join(f"| `{path}` | {described} |" for path, described in fields(schema, ""))
    return f"| field | |\n| --- | --- |\n{rows}"


def fields(schema: dict, path: str) -> Iterator[tuple[str, str]]:
    """Every field of a JSON schema by its path, with its description."""
    for name, own in schema.get("properties", {}).items():
        yield f"{path}{name}", own["description"]
        yield from fields(own, f"{path}{name}.")
        yield from fields(own.get("items", {}), f"{path}{name}[].")
