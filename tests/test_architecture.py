"""The architecture, as a test: which module may import which, and what no module may do."""

import ast
import re
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from xml.etree import ElementTree

import pytest

import lightning_gnn_dist
from tests.conftest import OF_ALL
from tests.extensions import ALL, MISSING
from tests.pages import ROOT, gone

PACKAGE = Path(__file__).parents[1] / "lightning_gnn_dist"

# A folder imports only from folders on lines above its own. Those on one line never import each other: the data
# column and the strategy column meet in `joint`.
LINE = [
    {"gone"},
    {"checks", "joint", "answers", "names", "short_names"},
    {"wire", "graph"},
    {"partition", "engine"},
    {"prepare", "sampling"},
    {"batches"},
    {"layers"},
    {"boundary"},
    {"homes", "rounds"},
    {"data", "strategies"},
    {"callbacks"},
    {"cli"},
    {"extensions"},
]
HEIGHT = {name: height for height, names in enumerate(LINE) for name in names}
ROOT_FILES = {"__init__", "__main__", "answers", "checks", "gone", "joint", "names", "short_names"}
FACADES = {"__init__", "__main__"}
TALKS = {"wire", "extensions"}  # what calls torch.distributed: whoever says who meets may do so in his own way
PRINTS = "cli"  # the one folder that prints, beside the commands of extensions
COMMAND = "command.py"
# What imports by a text: the facade, and what names others.
NAMES = {"__init__", "names", "cli", "prepare"}
KNOWS_NO_BATCH = "engine"  # neither PyG nor Lightning
MAX_FUNCTION_LINES = 60
BESIDE_THE_CORE = {"extensions", "prepare"}  # what the strategies and the data module do without
# What may only fall: modules, lines of code and modules beside the core that these import, themselves among them.
MAX_CLOSURES = {("strategies",): (31, 4_300, 0), ("strategies", "data/datamodule.py"): (77, 11_496, 0)}
MAX_ARGUMENTS = 12  # of a constructor

Rule = Callable[[Path], Iterator[str]]


def imports_follow_the_line(package: Path) -> Iterator[str]:
    for path in modules(package):
        own = part(path, package)
        if own in FACADES:
            continue
        if own not in HEIGHT:
            yield f"{path.name}: {own} is not on the line"
            continue
        others = {part(module, package) for module in imported_modules(path, package)}
        for other in sorted(others - {own}):
            if HEIGHT.get(other, len(LINE)) >= HEIGHT[own]:
                yield f"{path.name}: {own} may not import {other}"


def the_root_stays_short(package: Path) -> Iterator[str]:
    for path in package.glob("*.py"):
        if path.stem not in ROOT_FILES:
            yield f"{path.name} lies in the root, which has {sorted(ROOT_FILES)} alone: choose a folder"


def the_engine_knows_neither_pyg_nor_lightning(package: Path) -> Iterator[str]:
    for path in modules(package):
        if part(path, package) == KNOWS_NO_BATCH:
            for module, _ in imports(path):
                if module.split(".")[0] in ("lightning", "torch_geometric"):
                    yield f"{path.name} imports {module}: {KNOWS_NO_BATCH} is for loops over numbers"


def names_come_from_the_module_that_defines_them(package: Path) -> Iterator[str]:
    for path in modules(package):
        for module, name in imports(path):
            if module.startswith("."):
                yield f"{path.name}: relative import of {module}"
            elif is_package(module, package) and not find(module, name, package):
                yield f"{path.name}: {name or 'it'} imported from {module}, which is not the defining module"


def sub_packages_export_nothing(package: Path) -> Iterator[str]:
    for path in package.rglob("*/__init__.py"):
        if len(tree(path).body) > 1:
            yield f"{path.parent.name}/__init__.py holds more than a docstring"


def no_module_imports_itself_through_others(package: Path) -> Iterator[str]:
    graph = {path: imported_modules(path, package) for path in modules(package) if part(path, package) != "__init__"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        yield "a cycle: " + " -> ".join(str(path.relative_to(package)) for path in error.args[1])


def one_folder_talks_to_torch_distributed(package: Path) -> Iterator[str]:
    for path in modules(package):
        names = [f"{module}.{name}" if name else module for module, name in imports(path)]
        names += ["torch.distributed" for node in nodes(path) if is_torch_distributed(node)]
        if part(path, package) not in TALKS and any(f"{name}.".startswith("torch.distributed.") for name in names):
            yield f"{path.name} uses torch.distributed: that is what wire is for"


def nobody_prints(package: Path) -> Iterator[str]:
    for path in modules(package):
        if part(path, package) == PRINTS or (part(path, package) == "extensions" and path.name == COMMAND):
            continue
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
                yield f"{path.name}:{node.lineno} prints: log, or let {PRINTS} do it"


def few_import_by_a_text(package: Path) -> Iterator[str]:
    for path in modules(package):
        if part(path, package) not in NAMES and {name for _, name in imports(path)} & {"import_module", "resolve_name"}:
            yield f"{path.name} imports by a text, which no rule on imports sees: names.py has a table for it"


def every_module_says_what_it_is(package: Path) -> Iterator[str]:
    for path in modules(package):
        if not ast.get_docstring(tree(path)):
            yield f"{path.name} has no docstring"


def functions_stay_small(package: Path) -> Iterator[str]:
    for path in modules(package):
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield f"{path.name}: {node.name} has {lines} lines, more than {MAX_FUNCTION_LINES}"


def constructors_take_few_arguments(package: Path) -> Iterator[str]:
    for path in modules(package):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef) and (count := num_arguments(node)) > MAX_ARGUMENTS:
                too_many = f"{path.name}: {node.name} takes {count} arguments, more than {MAX_ARGUMENTS}"
                yield f"{too_many}: make one value of what belongs together"


RULES: list[Rule] = [
    imports_follow_the_line,
    the_root_stays_short,
    the_engine_knows_neither_pyg_nor_lightning,
    names_come_from_the_module_that_defines_them,
    sub_packages_export_nothing,
    no_module_imports_itself_through_others,
    one_folder_talks_to_torch_distributed,
    nobody_prints,
    few_import_by_a_text,
    every_module_says_what_it_is,
    functions_stay_small,
    constructors_take_few_arguments,
]


def modules(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


def part(path: Path, package: Path) -> str:
    """The folder that a file belongs to: `graph` for graph/store.py, `checks` for checks.py."""
    return path.relative_to(package).with_suffix("").parts[0]


def num_arguments(node: ast.ClassDef) -> int:
    """Of a class's own constructor without ``self``: that of a dataclass takes its fields."""
    count = 0
    is_dataclass = any("dataclass" in ast.unparse(decorator) for decorator in node.decorator_list)
    for item in node.body:
        if isinstance(item, ast.FunctionDef) and item.name == "__init__":
            count = len(item.args.posonlyargs + item.args.args + item.args.kwonlyargs) - 1
        elif is_dataclass and isinstance(item, ast.AnnAssign):
            is_field = "ClassVar" not in ast.unparse(item.annotation)
            count += is_field and (item.value is None or "init=False" not in ast.unparse(item.value))
    return count


def is_torch_distributed(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and (node.attr, getattr(node.value, "id", "")) == ("distributed", "torch")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


@cache
def imports(path: Path, at_run_time: bool = False) -> list[tuple[str, str]]:
    """Every import of a file, wherever it stands, as (module, name); the name is empty in `import module`.

    At run time those under ``if TYPE_CHECKING`` do not count.
    """
    found: list[tuple[str, str]] = []
    blocks = [node for node in nodes(path) if isinstance(node, ast.If)] if at_run_time else []
    of_types = [each for node in blocks if ast.unparse(node.test) == "TYPE_CHECKING" for each in node.body]
    skipped = {id(node) for each in of_types for node in ast.walk(each)}
    for node in nodes(path):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            found += [("." * node.level + (node.module or ""), alias.name) for alias in node.names]
    return found


@cache
def imported_modules(path: Path, package: Path, at_run_time: bool = False) -> set[Path]:
    """The files of the package that a file imports."""
    named = imports(path, at_run_time)
    found = {find(module, name, package) for module, name in named if is_inside(module, package)}
    return {module for module in found if module is not None}


def is_inside(module: str, package: Path) -> bool:
    return module.split(".")[0] == package.name


def is_package(module: str, package: Path) -> bool:
    return is_inside(module, package) and package.parent.joinpath(*module.split(".")).is_dir()


def find(module: str, name: str, package: Path) -> Path | None:
    """The file behind an import; None when there is only a package, whose names are defined elsewhere."""
    for dotted in (f"{module}.{name}", module):
        file = package.parent.joinpath(*dotted.split(".")).with_suffix(".py")
        if file.is_file():
            return file
    return None


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_package_keeps_the_rule(rule: Rule) -> None:
    assert list(rule(PACKAGE)) == []


def names_come_from_the_facade_where_it_has_them(folder: Path) -> Iterator[str]:
    """So that a merge inside the package touches no test."""
    exported = lightning_gnn_dist._DEFINED_IN.keys() - gone()
    defined = {(getattr(lightning_gnn_dist, name).__module__, name) for name in exported}
    for path in modules(folder):
        for module, name in imports(path):
            if (module, name) in defined:
                yield f"{path.name}: {name} imported from {module}: tests import it from lightning_gnn_dist"


def no_test_of_the_core_names_an_extension(folder: Path) -> Iterator[str]:
    """Neither by its module nor by a public name: so its folder can be deleted with its tests."""
    public = [name for name, module in lightning_gnn_dist._DEFINED_IN.items() if ".extensions." in module]
    facade = rf"\b(lightning_gnn_dist|lgd|package)\.({'|'.join(public)})\b"
    named = re.compile("|".join([rf"\bextensions\.({'|'.join(ALL)})\b", *[facade] * bool(public)]))
    for path in modules(folder):
        if path.relative_to(folder).parts[0] in ("extensions", "test_architecture.py", *OF_ALL):
            continue
        texts = {".".join(names) for names in imports(path)}
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                texts.add(f"{node.value.id}.{node.attr}")
        for text in sorted(texts):
            if found := named.search(text):
                yield f"{path.name} names {found[0]}: what tries an extension lies in its folder of tests/extensions"


def closure_of(starts: Iterable[Path], package: Path) -> set[Path]:
    """All modules that some import, directly or through others, inside functions too."""
    known, ahead = set(starts), list(starts)
    while ahead:
        new = imported_modules(ahead.pop(), package, at_run_time=True) - known
        known |= new
        ahead += new
    return known


def code_lines(path: Path) -> int:
    """Lines without blanks, comments and docstrings."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [node.body[0] for node in nodes(path) if isinstance(node, documented) and ast.get_docstring(node)]
    skipped = {number for text in texts for number in range(text.lineno, (text.end_lineno or text.lineno) + 1)}
    lines = enumerate(path.read_text().splitlines(), 1)
    return sum(
        bool(line.strip()) and not line.strip().startswith("#") and number not in skipped for number, line in lines
    )


@pytest.mark.parametrize("places", MAX_CLOSURES, ids=" and ".join)
def test_the_core_imports_no_more_than_before(places: tuple[str, ...]) -> None:
    starts = [path for place in places for path in (PACKAGE / place).glob("*.py")]
    starts += [PACKAGE / place for place in places if place.endswith(".py")]
    found = [path for path in closure_of(starts, PACKAGE) if path.stem not in ("__init__", "gone")]  # old names
    beside = [path for path in found if part(path, PACKAGE) in BESIDE_THE_CORE]
    counts = len(found), sum(map(code_lines, found)), len(beside)
    assert all(count <= most for count, most in zip(counts, MAX_CLOSURES[places], strict=True)), counts


def test_tests_import_the_facade_and_have_small_functions() -> None:
    assert list(names_come_from_the_facade_where_it_has_them(PACKAGE.parent / "tests")) == []
    assert list(functions_stay_small(PACKAGE.parent / "tests")) == []
    assert list(no_test_of_the_core_names_an_extension(PACKAGE.parent / "tests")) == []


def test_the_list_of_extensions_has_all_of_them() -> None:
    assert {path.parent.name for path in PACKAGE.glob("extensions/*/__init__.py")} <= set(ALL)
    assert [name for name in OF_ALL if not (PACKAGE.parent / "tests" / name).exists()] == []


@pytest.mark.parametrize("folder", ["benchmarks", "examples"])
def test_functions_outside_the_package_stay_small_too(folder: str) -> None:
    assert list(modules(PACKAGE.parent / folder))
    assert list(functions_stay_small(PACKAGE.parent / folder)) == []


HERE, PLAN = "lightning_gnn_dist", "@dataclass(frozen=True)\nclass Plan:\n"
FIELDS = "".join(f"    a{n}: int = {n}\n" for n in range(13))
NO_ARGUMENTS = "    known: ClassVar[int] = 1\n    held: dict = field(default_factory=dict, init=False)\n"
CYCLE = {"graph/graph.py": f"from {HERE}.graph import store"}
CYCLE["graph/store.py"] = f"if TYPE_CHECKING:\n    from {HERE}.graph.graph import Graph"
BY_TEXT = "from importlib import import_module"
OF_LINKS = dict.fromkeys(("test_graph.py", "extensions/links/test_a.py"), f"from {HERE} import LinkSplit")
BAD_TREES: list[tuple[Rule, str, dict[str, str]]] = [
    (
        imports_follow_the_line,
        "b.py: rounds may not import data",
        {"data/d.py": "", "rounds/b.py": f"import {HERE}.data.d"},
    ),
    (imports_follow_the_line, "tools.py: utils is not on the line", {"utils/tools.py": ""}),
    (the_root_stays_short, "loader.py lies in the root", {"loader.py": ""}),
    (the_engine_knows_neither_pyg_nor_lightning, "h.py imports lightning", {"engine/h.py": "import lightning.pytorch"}),
    (
        names_come_from_the_module_that_defines_them,
        f"loader.py: Graph imported from {HERE}.graph, which is not the defining module",
        {"graph/__init__.py": "", "loader.py": f"from {HERE}.graph import Graph"},
    ),
    (sub_packages_export_nothing, "graph/__init__.py holds more", {"graph/__init__.py": '"""Graphs."""\nimport os'}),
    (no_module_imports_itself_through_others, "a cycle: ", CYCLE),
    (
        one_folder_talks_to_torch_distributed,
        "b.py uses torch.distributed",
        {"rounds/b.py": "torch.distributed.barrier()"},
    ),
    (nobody_prints, "base.py:1 prints: ", {"rounds/base.py": "print(1)", "cli/main.py": "print(1)"}),
    (few_import_by_a_text, "base.py imports by a text", {"rounds/base.py": BY_TEXT, "names.py": BY_TEXT}),
    (
        names_come_from_the_facade_where_it_has_them,
        f"test_graph.py: Graph imported from {HERE}.graph.graph",
        {"test_graph.py": f"def f():\n    from {HERE}.graph.graph import Graph, typed_graph"},
    ),
    *[(no_test_of_the_core_names_an_extension, f"test_graph.py names {HERE}.LinkSplit: ", OF_LINKS)] * (not MISSING),
    (
        no_test_of_the_core_names_an_extension,
        "a.py names extensions.links: ",
        {"a.py": "import tests.extensions.links"},
    ),
    (every_module_says_what_it_is, "rounds.py has no docstring", {"rounds.py": "x = 1"}),
    (functions_stay_small, "rounds.py: f has 61 lines", {"rounds.py": "def f():\n" + "    1\n" * 60}),
    (constructors_take_few_arguments, "p.py: Plan takes 13 arguments", {"data/p.py": PLAN + FIELDS + NO_ARGUMENTS}),
]


@pytest.mark.parametrize(("rule", "complaint", "files"), BAD_TREES)
def test_a_tree_that_breaks_the_rule_is_refused(rule, complaint, files, tmp_path) -> None:
    package = tmp_path / "lightning_gnn_dist"
    for name, code in files.items():
        (package / name).parent.mkdir(parents=True, exist_ok=True)
        (package / name).write_text(code)
    (found,) = rule(package)
    assert found.startswith(complaint)


# The drawing of the architecture says what the imports say: every box is there, and every arrow is an import.


DRAWN = list(ElementTree.parse(ROOT / "docs" / "assets" / "architecture.svg").iter())
ARROWS = [(each.attrib["data-from"], each.attrib["data-to"]) for each in DRAWN if "data-from" in each.attrib]
EXTENSIONS = {
    each.attrib["data-extension"]: each.attrib["data-by"].split() for each in DRAWN if "data-by" in each.attrib
}
EXTENSIONS = {name: places for name, places in EXTENSIONS.items() if name not in MISSING}


def files_of(place: str) -> set[Path]:
    return {PACKAGE / place} if place.endswith(".py") else set(modules(PACKAGE / place))


def needs(one: str, other: str) -> bool:
    """Whether a module of one place needs a module of the other, itself or through a third."""
    direct = {module for path in files_of(one) for module in imported_modules(path, PACKAGE)}
    return not files_of(other).isdisjoint(direct.union(*(imported_modules(path, PACKAGE) for path in direct)))


def test_every_box_is_there_and_every_extension_has_one() -> None:
    drawn = [each.attrib["data-module"] for each in DRAWN if "data-module" in each.attrib]
    assert len(drawn) > 20 and [place for place in drawn if not (PACKAGE / place).exists()] == []
    assert set(EXTENSIONS) == {path.parent.name for path in (PACKAGE / "extensions").glob("*/__init__.py")}


def test_the_columns_meet_in_one_module() -> None:
    assert ("data/datamodule.py", "joint.py") in ARROWS and needs("strategies", "joint.py")


def test_every_extension_has_a_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \| \[", (ROOT / "docs" / "architecture.md").read_text(), re.MULTILINE)
    assert rows == sorted([*EXTENSIONS, *MISSING])


@pytest.mark.parametrize(("one", "other"), ARROWS)
def test_an_arrow_is_an_import(one: str, other: str) -> None:
    assert needs(one, other) or needs(other, one)


@pytest.mark.skipif(bool(MISSING), reason="what needs another may have lost modules with it")
@pytest.mark.parametrize("name", EXTENSIONS)
def test_an_extension_imports_what_it_comes_in_by(name: str) -> None:
    assert [place for place in EXTENSIONS[name] if not needs(f"extensions/{name}", place)] == []
