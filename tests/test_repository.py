"""What the repository promises about itself."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from processes import ENVIRONMENT

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_dependency_is_pinned_and_torch_exactly():
    pins = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")
    )
    assert pins["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {normal(re.split(r"[<>=\[ ]", entry)[0]) for entry in wanted}
    assert names <= {normal(name) for name in pins}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_device_names_and_collectives_stay_in_dist(path):
    text = path.read_text()
    if "dist" not in path.relative_to(ROOT / "src" / "groupwise").parts:
        assert not re.search(r"\.cuda\b|[\"'](nccl|hccl|gloo|npu|cuda)[\"']|torch\.distributed|import accelerate", text)


def test_the_folder_map_in_the_readme_is_true():
    shown = re.findall(r"^ {6}(\w+(?:\.py)?)/? {2,}", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    package = ROOT / "src" / "groupwise"
    real = {path.name for path in package.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(shown) == real


def test_everything_that_the_docs_name_and_every_test_is_in_the_repository():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for name in re.findall(r"\b((?:tests|bench|examples|docs|src)/[\w/.-]+\.(?:py|md))", page.read_text()):
            assert name in listed, f"{page.name} names {name}"
    for path in (ROOT / "tests").rglob("*.py"):
        assert str(path.relative_to(ROOT)) in listed


def test_the_package_imports_nothing_that_the_wheel_does_not_hold():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["packages"] == ["src/groupwise"]
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                outside = name.split(".")[0] in ("bench", "examples", "tests", "tools")
                assert not outside, f"{path.relative_to(ROOT)}:{node.lineno} imports {name}"


def test_recipes_load_without_torch():
    program = (
        "import sys\n"
        "from groupwise.recipes import RECIPES, load_recipe\n"
        "for name in RECIPES: load_recipe(name)\n"
        "sys.exit('torch' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, check=False).returncode == 0


def test_the_loop_in_the_readme_is_the_loop():
    """The same statements in the same order; only timers are left out."""
    (shown,) = re.findall(r"```python\n(state\.optimizer.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    source = (ROOT / "src" / "groupwise" / "training" / "loop.py").read_text()
    body = source[source.index("    state.optimizer") : source.index('    timer.end("update")')]
    real = "\n".join(line.removeprefix("    ") for line in body.splitlines() if not line.strip().startswith("timer."))
    assert ast.unparse(ast.parse(shown)) == ast.unparse(ast.parse(real))
