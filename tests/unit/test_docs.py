"""The commands in the documentation: right as they stand; the long test runs them, shortened."""

import ast
import re
import runpy
import shlex
from pathlib import Path

import drilling
import keras  # noqa: F401 - it changes the environment, which no test may do
import pytest
from helpers import REPO
from hydra._internal.utils import get_args_parser

import kdist
from kdist.cli.compose import as_hydra_reads, compose, without_hydra
from kdist.cli.experiment import check_job
from kdist.cli.hydra_plugins import register

PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
_FILE = re.compile(r'title="(\w+\.py)"\n(.*?)```', re.DOTALL)
#: The modules that pages show, by the names of their files; of several with one name the last one.
CODE = dict(found for page in PAGES for found in _FILE.findall(page.read_text()))


def commands_of(page: Path) -> list[list[str]]:
    """The arguments of the `python -m kdist` commands in blocks of bash of a page."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text(), re.DOTALL)
    lines = [shlex.split(line, comments=True) for b in blocks for line in b.replace("\\\n", " ").splitlines()]
    # What is for a shell on several machines is tried by the tests of such clusters.
    return [words[3:] for words in lines if words[:3] == ["python", "-m", "kdist"] and "$H" not in words]


def commands() -> list[tuple[str, list[str]]]:
    """The commands of all pages, but those that need the run of another one."""
    found: list[tuple[str, list[str]]] = []
    for page in PAGES:
        for arguments in commands_of(page):
            if "--again" not in arguments and arguments not in [others for _, others in found]:
                found.append((page.relative_to(REPO).as_posix(), arguments))
    return found


@pytest.fixture(autouse=True)
def in_a_folder_with_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "my_code.py" in CODE
    for name, text in CODE.items():
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def test_the_config_reference_is_that_of_the_schema() -> None:
    page = runpy.run_path(str(REPO / "docs" / "config_reference.py"))["page"]()
    assert (REPO / "docs" / "reference" / "config.md").read_text() == page, "run python docs/config_reference.py"


def test_the_picture_of_the_rooms_is_that_of_the_code() -> None:
    drawn = runpy.run_path(str(REPO / "docs" / "rooms.py"))["picture"]()
    assert (REPO / "docs" / "pictures" / "rooms.svg").read_text() == drawn, "run python docs/rooms.py"


def test_the_places_in_the_code_that_the_page_of_its_layout_names_exist() -> None:
    page = (REPO / "docs" / "contributing.md").read_text()
    places = sorted(set(re.findall(r"`([\w/]+\.py)(?::([\w.]+))?`", page)))
    assert len(places) > 30
    for file, name in places:
        path = next(
            (root / file for root in (REPO / "kdist", REPO, REPO / "benchmarks") if (root / file).exists()), None
        )
        assert path is not None, file
        assert not name or name in _defined_in(ast.parse(path.read_text()).body), f"{file}:{name}"


def _defined_in(body: list[ast.stmt], prefix: str = "") -> set[str]:
    """Names of the functions and classes, and of the methods of classes as `Class.method`."""
    found = set()
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(f"{prefix}{node.name}")
            found |= _defined_in(node.body, f"{prefix}{node.name}.") if isinstance(node, ast.ClassDef) else set()
    return found


def test_drills_write_their_own_table(tmp_path: Path) -> None:
    page, text = tmp_path / "drills.md", drilling.PAGE.read_text()
    page.write_text(text)
    drilling.write_table("make drills", ["| one row |"], page)
    own, other = page.read_text().split("## Several hosts")
    assert re.search(r"<!-- make drills -->\n\n.* cores .*\n\n\| one row \|\n\n<!-- end -->\n", own)
    assert "kill -9 of an async worker" not in own
    assert other == text.split("## Several hosts")[1]


@pytest.mark.parametrize(("page", "arguments"), commands())
def test_commands_of_the_docs_are_right(page: str, arguments: list[str]) -> None:
    if "-m" in arguments:
        # The first job that there could be.
        arguments = [a if "={" in a else a.split(",")[0] for a in arguments if a != "-m"]
        arguments = [a if "(" not in a else a.split("=")[0] + "=0.01" for a in arguments]
        arguments = [a for a in arguments if not a.startswith(("hydra/", "hydra.sweeper", "hydra.launcher"))]
    register()
    parsed = get_args_parser().parse_args(as_hydra_reads(arguments))
    check_job(without_hydra(compose(parsed)[0]), parsed)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.name)
def test_commands_of_the_docs_run_one_after_the_other(page: Path, tmp_path: Path) -> None:
    from commands import kdist

    for given in commands_of(page):
        # tests/cluster/test_runs_on_object_storage.py has a bucket.
        if any("://" in text for text in given):
            continue
        # One seed stands for all.
        arguments = [re.sub(r"^(run\.seed=\d+),.*", r"\1", text) for text in given]
        keys = {text.partition("=")[0] for text in arguments}
        has_end = keys & {"train.more_epochs", "train.more_steps"} or ("train.steps" in keys and "-m" not in keys)
        shorter = ["train.epochs=1"] if "train.epochs" in keys else [] if has_end else ["train.steps=60"]
        part = f"data.path={REPO / 'recipes' / 'mnist_part.npz'}"
        shorter += [part] if any(text.startswith("+recipe=mnist") for text in arguments) else []
        done = kdist(*arguments, *shorter, cwd=tmp_path, timeout=200)
        assert done.returncode == 0, f"{' '.join(given)}\n{done.stderr}"


def _messages() -> str:
    """All texts in the code, a line each, without what is put into them."""
    texts = []
    for path in sorted((REPO / "kdist").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in texts)


def test_the_messages_that_troubleshooting_explains_are_in_the_code() -> None:
    page = (REPO / "docs" / "troubleshooting.md").read_text()
    rows = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(rows) > 30
    code = _messages()
    absent = [row for row in rows if not re.search("[^\n]*".join(map(re.escape, row.split("..."))), code)]
    assert absent == []


@pytest.mark.parametrize(
    "page", [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))], ids=lambda page: page.name
)
def test_snippets_import_kdist_before_keras_and_tensorflow(page: Path) -> None:
    # Which print messages, among them red ones, unless kdist was imported before.
    for snippet in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL):
        imported = re.findall(r"^(?:import|from) (kdist|keras|tensorflow)\b", snippet, re.MULTILINE)
        assert "kdist" not in imported or imported[0] == "kdist", snippet


def test_the_reference_has_every_hook() -> None:
    page = (REPO / "docs" / "reference" / "hooks.md").read_text()
    listed = re.findall(r"^::: kdist\.(?:hooks|extras\.\w+)\.(\w+)$", page, re.MULTILINE)
    classes = [name for name in kdist.hooks.__all__ if name[0].isupper()]
    described_in_base = ("Hook", "RunContext", "RunValues", "Session")
    assert sorted(listed) == sorted(["base", *(name for name in classes if name not in described_in_base)])
