"""The shape of the package: who may import whom, and what every part owes the reader."""

import ast
import graphlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from slow_cases import SLOW_CASES

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "natgrad"

# Each part may import the parts of the lines above its own. Parts on one line never see each other.
LAYERS = [
    ["_types", "_backend", "_check", "_files", "_progress", "_text"],
    ["_tree"],
    ["_vector"],
    ["_linalg", "_model"],
    ["_family", "_operator", "_sites"],
    ["_geometry"],
    ["_per_example"],
    ["_blocks"],
    ["_metric"],
    ["_solve"],
    ["_manifold", "_proximal"],
    ["_optimiser"],
    ["_online", "_problem"],
    ["_parallel"],
    ["__init__"],
    ["pde", "vmc", "vi", "glm", "laplace", "policy", "problems"],
    ["plots", "report", "comparison"],
    ["cli"],
    ["__main__"],
]
LEVEL = {part: level for level, parts in enumerate(LAYERS) for part in parts}

# Inside a folder, modules import `base` and these helpers, ...
HELPERS = {
    "_blocks": {"paths", "uses"},
    "cli": {"ending", "failure", "loading", "options", "screen"},
    "comparison": {"folder", "methods", "run"},
    "_family": {"conjugate", "counts", "special", "symmetric"},
    "_geometry": {"autodiff"},
    "_metric": {"linearise", "output", "samples"},
    "_online": {"precision.base"},
    "_operator": {"factor"},
    "_optimiser": {
        "batch",
        "damping.base",
        "evaluation",
        "history",
        "info",
        "momentum",
        "objective",
        "problem",
        "step.base",
        "structure.base",
        "structure.cotangents",
    },
    "_per_example": {"chunks", "recording"},
    "_proximal": {"inner", "problem", "step"},
    "plots": {"_rosenbrock", "_style"},
    "problems": {"_arrays", "_columns", "_parts", "_perceptron", "_sklearn", "data"},
    "report": {"charts", "text"},
    "_sites": {"compat", "plan", "rules.layout", "slices", "uses", "values"},
    "_solve": {"result"},
}
# ... and an assembly imports its parts, written as {"folder.assembly": {"part", ...}}.
ASSEMBLIES = {
    "comparison.compare": {"geometry"},
    "comparison.geometry": {"spectrum"},
    "comparison.document": {"compare", "geometry", "verdict"},
    "comparison.training": {"compare", "geometry"},
    "comparison.verdict": {"compare"},
    "_blocks.choose": {"dense", "diagonal", "kronecker", "masks"},
    "_blocks.eigen": {"kronecker"},
    "_family.beta": {"dirichlet"},
    "_family.gaussian": {"gaussian_precision"},
    "_geometry.dual_fisher": {"fisher"},
    "_metric.ekfac": {"blocks", "factored"},
    "_metric.factored": {"blocks", "diagonal"},
    "_metric.gram": {"diagonal"},
    "_metric.kfac": {"blocks", "factored"},
    "_metric.loader": {"blocks", "diagonal", "pullback", "running"},
    "_metric.moments": {"pullback"},
    "_per_example.blocks": {"factored", "lookups", "rows"},
    "_per_example.explain": {"in_backward"},
    "_per_example.forward": {"in_backward", "operator"},
    "_per_example.per_example": {"forward", "operator", "probe"},
    "_per_example.probe": {"forward"},
    "_per_example.lookups": {"factored"},
    "_per_example.operator": {"blocks", "explain", "in_backward", "statistics"},
    "_per_example.statistics": {"blocks", "factored", "lookups", "rows"},
    "_online.natural_gradient": {"precision.dense"},
    "_operator.damped": {"batched"},
    "_operator.dense": {"eigen"},
    "_operator.eigen": {"batched"},
    "_operator.kronecker": {"eigen"},
    "_optimiser.natural_gradient": {
        "compatible",
        "conclusion",
        "damping.constant",
        "damping.levenberg_marquardt",
        "flax",
        "step.quadratic_model",
        "structure.kfac",
        "trainable",
    },
    "_optimiser.flax": {"conclusion"},
    "_optimiser.optax": {"damping.constant", "natural_gradient", "step.constant", "trainable"},
    "_optimiser.step.line_search": {"step.trust_region"},
    "_optimiser.structure.ekfac": {"structure.factors"},
    "_optimiser.structure.inner_solve": {"structure.exact"},
    "_optimiser.structure.kfac": {"structure.factors"},
    "_sites.control_flow": {"free_scan"},
    "_sites.flow": {"control_flow"},
    "_sites.layers": {"copies", "flow", "low_rank", "routes", "trace"},
    "_sites.low_rank": {"copies", "routes"},
    "_sites.routes": {"copies", "rules.convolution", "rules.dense", "rules.lookup"},
    "_sites.sites": {"control_flow"},
    "_sites.call": {"coupling"},
    "_sites.trace": {"call", "sites"},
    "_solve.auto": {"blockwise", "cg", "cholesky", "elementwise", "pseudo_inverse", "sample_space"},
    "_solve.solve": {"auto"},
    "_manifold.invariance": {"chart"},
    "plots._gallery": {
        "_bregman",
        "_contours",
        "_function_space",
        "_gaussians",
        "_matrices",
        "_overparametrised",
        "_pullback",
    },
    "report.files": {"page"},
    "report.page": {"comparison", "geometry"},
    "problems._gallery": {"_chars", "_diabetes", "_digits", "_mnist", "_poisson", "_rosenbrock"},
    "problems.tables": {"_csv"},
}

OPTIONAL = {"matplotlib", "plotly", "rich", "typer", "sklearn", "orbax", "tensorboardX"}
MAX_LINES = 400
# Public by its documentation, in spite of its name.
PUBLIC = {"os._exit"}


def package_sources() -> dict[str, str]:
    """Sources of the package by dotted name without `natgrad`; folders end in `__init__`."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts): path.read_text() for path in PACKAGE.rglob("*.py")
    }


def imports(module: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What `module` imports: the absolute dotted name, and the name it is bound to."""
    package = ["natgrad", *module.split(".")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((a.name, a.asname or a.name.split(".")[0]) for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) + 1 - node.level] if node.level else []
            prefix = ".".join([*base, *filter(None, [node.module])])
            yield from ((f"{prefix}.{a.name}", a.asname or a.name) for a in node.names)


def internal_imports(module: str, sources: dict[str, str]) -> Iterator[str]:
    """Modules of the package that `module` imports, named as in `sources`."""
    for name, _ in imports(module, ast.parse(sources[module])):
        top, *parts = name.split(".")
        if top == "natgrad":
            # The longest prefix that is a module or a folder; the rest are attributes.
            prefixes = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
            candidates = [c for p in prefixes for c in (p, f"{p}.__init__")] + ["__init__"]
            yield next(candidate for candidate in candidates if candidate in sources)


def may_import(module: str, target: str) -> bool:
    folder, _, name = module.partition(".")
    part, _, sibling = target.partition(".")
    if folder != part:
        return LEVEL[part] < LEVEL[folder]
    shared = {"base"} | HELPERS.get(folder, set()) | ASSEMBLIES.get(module, set())
    return name == "__init__" or sibling in shared


def direction_violations(sources: dict[str, str]) -> list[str]:
    return [
        f"{module} imports {target}"
        for module in sources
        for target in sorted(set(internal_imports(module, sources)))
        if not may_import(module, target)
    ]


def nested_imports(module: str, source: str) -> list[str]:
    """Imports inside functions, of anything but an optional dependency."""
    return [
        name
        for function in ast.walk(ast.parse(source))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for name, _ in imports(module, function)
        if name.split(".")[0] not in OPTIONAL
    ]


def private_names(module: str, source: str) -> list[str]:
    """Private parts of other packages, imported or reached as attributes of an import."""
    tree = ast.parse(source)
    foreign = {name: bound for name, bound in imports(module, tree) if name.split(".")[0] != "natgrad"}
    attributes = (ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    reached = [name for name in attributes if name.split(".")[0] in foreign.values()]
    private = re.compile(r"jax\.interpreters\b|[\w.]*\b_(?!_)")
    return [name for name in [*foreign, *reached] if private.match(name) and name not in PUBLIC]


def public_names(source: str) -> set[str]:
    """Names exported as `Name as Name`."""
    return {
        alias.name
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if alias.asname == alias.name and not alias.name.startswith("_")
    }


def exported_functions(sources: dict[str, str]) -> dict[str, list[str]]:
    """The decorators of every function that the package exports."""
    found = {}
    for name, bound in imports("__init__", ast.parse(sources["__init__"])):
        top, _, rest = name.partition(".")
        module, _, _ = rest.rpartition(".")
        if top == "natgrad":
            definitions = (node for node in ast.parse(sources[module]).body if isinstance(node, ast.FunctionDef))
            found |= {f.name: list(map(ast.unparse, f.decorator_list)) for f in definitions if f.name == bound}
    return found


def documented_names(page: str) -> set[str]:
    return set(re.findall(r"^ *::: natgrad\.([\w.]+)$", page, re.MULTILINE))


def machine_paths(text: str) -> list[str]:
    return re.findall(r"(?<![\w.$~])/(?:home|root|work|Users|mnt)/\w+", text)


def equation_readers(sources: dict[str, str]) -> list[str]:
    """Modules that read the parameters of a jaxpr's equations, whose names JAX may change."""
    return [module for module, source in sources.items() if re.search(r"\beqn\.params\b", source)]


@pytest.mark.compat
def test_imports_point_one_way():
    assert direction_violations(package_sources()) == []


def import_cycle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle, if there are any."""
    graph = {module: set(internal_imports(module, sources)) for module in sources}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.compat
def test_imports_have_no_cycles():
    assert import_cycle(package_sources()) == []


def test_a_cycle_is_caught():
    assert set(import_cycle({"_a": "import natgrad._b", "_b": "import natgrad._a", "__init__": ""})) == {"_a", "_b"}


@pytest.mark.compat
def test_functions_import_only_optional_dependencies():
    sources = package_sources()
    assert {m: names for m, s in sources.items() if (names := nested_imports(m, s))} == {}


@pytest.mark.compat
def test_no_private_modules_of_others():
    sources = package_sources()
    assert {m: names for m, s in sources.items() if (names := private_names(m, s))} == {}


@pytest.mark.compat
def test_every_public_name_has_an_api_page():
    pages = (page.read_text() for page in (ROOT / "docs" / "api").rglob("*.md"))
    documented = set().union(*map(documented_names, pages))
    assert public_names((PACKAGE / "__init__.py").read_text()) - documented == set()


def test_errors_are_raised_in_the_name_of_every_exported_function():
    functions = exported_functions(package_sources())
    assert len(functions) > 30
    assert [name for name, decorators in functions.items() if "public" not in decorators] == []


def test_files_are_short():
    lengths = {module: source.count("\n") for module, source in package_sources().items()}
    assert {m: length for m, length in lengths.items() if length > MAX_LINES} == {}


def test_no_machine_paths():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git checkout")
    files = [path for name in listing.stdout.split("\0") if (path := ROOT / name).is_file()]
    found = {path: machine_paths(path.read_text(errors="ignore")) for path in files}
    assert {path: paths for path, paths in found.items() if paths} == {}


# The checks above, on sources that break them.


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("_family.gaussian", "from .._geometry import Fisher"),
        ("_family.gaussian", "from .._operator import kronecker"),
        ("_family.gaussian", "from .poisson import Poisson"),
        ("_family.gaussian", "from . import Poisson"),
        ("_family.gaussian", "import natgrad"),
        ("_family.gaussian", "from natgrad._geometry.base import AbstractGeometry"),
        ("_family.base", "from .poisson import Poisson"),
        ("_tree", "from ._family.base import AbstractFamily"),
    ],
)
def test_wrong_direction_is_caught(module, line):
    others = ["__init__", "_tree", "_family.__init__", "_family.base", "_family.poisson"]
    others += ["_geometry.__init__", "_geometry.base", "_operator.__init__"]
    assert len(direction_violations(dict.fromkeys(others, "") | {module: line})) == 1


def test_right_direction_is_accepted():
    sources = {
        "_types": "import jax",
        "_family.__init__": "from .base import A as A\nfrom .poisson import Poisson as Poisson",
        "_family.base": "from .._types import Array",
        "_family.poisson": "from .base import A",
        "_geometry": "from ._family import Poisson\nfrom natgrad._family.base import A",
        "__init__": "from ._geometry import Fisher as Fisher",
        "cli.main": "import natgrad as ng",
    }
    assert direction_violations(sources) == []


def test_nested_import_is_caught():
    source = "def f():\n    import {}\n"
    assert nested_imports("plots.loss", source.format("scipy.linalg")) == ["scipy.linalg"]
    assert nested_imports("plots.loss", source.format("matplotlib.pyplot")) == []


@pytest.mark.parametrize(
    "line",
    [
        "import jax._src.core",
        "from jax._src import core",
        "from jax import _src",
        "from jax.interpreters import ad",
        "import jax\njax._src.core.Var",
        "import jax\njax.interpreters.ad.jvp",
        "from equinox._module import Module",
        "import lineax as lx\nlx._operator.linearise",
    ],
)
def test_private_module_is_caught(line):
    assert private_names("_tree", line) != []


def test_public_module_is_accepted():
    source = "import jax\nfrom jax.extend import core\nfrom .._tree import _dot\nself._field\n"
    source += "from __future__ import annotations\nfamily._domain\njax.numpy.linalg.eigh\n"
    assert private_names("_family.base", source) == []


def test_undocumented_name_is_caught():
    exported = public_names("from ._a import B as B, _c as _c, d\nfrom ._e import F as F")
    assert exported - documented_names("# B\n\n::: natgrad.B\n    options: {}\n") == {"F"}


def test_machine_path_is_caught():
    # Assembled here, since this file is searched as well.
    assert machine_paths("see /" + "home/someone/file") != []
    assert machine_paths("https://example.org/" + "work/page ~/" + "work/x") == []


def factorisers(sources: dict[str, str]) -> list[str]:
    """Modules that call LAPACK through JAX, other than to draw figures."""
    calls = r"(jnp|scipy|lax|jsp)\.linalg\.(cholesky|cho_|eig|svd|lstsq|solve|inv|pinv|qr|det|slogdet|triangular)"
    found = [module for module, source in sources.items() if re.search(calls, source)]
    return sorted(module for module in found if not module.startswith("plots."))


def test_one_file_factorises_matrices():
    """It goes through stacks of them one by one, since LAPACK calls on stacks can hang."""
    assert factorisers(package_sources()) == ["_linalg"]
    assert factorisers({"_a": "root = jnp.linalg.cholesky(matrix)"}) == ["_a"]


def test_one_file_knows_the_parameters_of_equations():
    assert equation_readers(package_sources()) == ["_sites.compat", "_sites.slices"]
    assert equation_readers({"_a": "length = eqn.params['length']"}) == ["_a"]


def test_cases_that_wait_belong_to_tests():
    for file, tests in SLOW_CASES.items():
        text = (ROOT / "tests" / file).read_text()
        assert [name for name in tests if f"def {name}(" not in text] == [""] * ("" in tests)
