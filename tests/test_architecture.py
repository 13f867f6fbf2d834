"""The shape of the package: who may import whom, and what every part owes the reader."""

import ast
import graphlib
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "natgrad"

# Rooms in the order in which data goes through them. Each may import the rooms of the lines above its own, and rooms on
# one line never see each other. Inside a room, files may import each other as long as no circle comes of it.
ROOMS = [
    ["_types", "_backend", "_check", "_atomic_write", "_text"],
    ["_compile", "_tree"],
    ["_linalg", "_model", "_vector"],
    ["_family", "_program"],
    ["_geometry", "_uses"],
    ["_point"],
    ["_block"],
    ["_metric"],
    ["_solve"],
    ["_constraint", "_manifold", "_proximal"],
    ["_optimiser"],
    ["_online", "_problem"],
    ["__init__"],
    ["problems", "testing"],
    ["experiment", "plots", "report"],
    ["cli"],
    ["__main__"],
]
LEVEL = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}

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
    room, target_room = module.partition(".")[0], target.partition(".")[0]
    if room == target_room:
        return module.endswith("__init__") or not target.endswith("__init__")
    return LEVEL[target_room] < LEVEL[room]


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


def imported_rooms(room: str, sources: dict[str, str]) -> set[str]:
    """The folders that the files of a room import."""
    files = [module for module in sources if module.startswith(f"{room}.")]
    targets = {target.partition(".")[0] for module in files for target in internal_imports(module, sources)}
    return {target for target in targets if (PACKAGE / target).is_dir()} - {room}


@pytest.mark.parametrize("room", sorted(path.parent.name for path in PACKAGE.glob("_*/__init__.py")))
def test_a_room_says_which_rooms_it_imports(room):
    docstring = ast.get_docstring(ast.parse((PACKAGE / room / "__init__.py").read_text())) or ""
    said = re.findall(r"`(\w+)`", docstring.partition("Imports ")[2])
    assert set(said) == imported_rooms(room, package_sources())


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
        ("_family.gaussian", "from .._block import kronecker"),
        ("_family.gaussian", "from . import Poisson"),
        ("_family.gaussian", "import natgrad"),
        ("_family.gaussian", "from natgrad._geometry.base import AbstractGeometry"),
        ("_tree", "from ._family.base import AbstractFamily"),
    ],
)
def test_wrong_direction_is_caught(module, line):
    others = ["__init__", "_tree", "_family.__init__", "_family.base", "_family.poisson"]
    others += ["_geometry.__init__", "_geometry.base", "_block.__init__"]
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
    assert equation_readers(package_sources()) == ["_program.compat", "_program.slices"]
    assert equation_readers({"_a": "length = eqn.params['length']"}) == ["_a"]
