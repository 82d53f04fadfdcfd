"""Every command and snippet in README and docs runs, in shrunken form: a documented command is never refused."""

import re
import shutil

import pytest
from markdown_blocks import ROOT, PageRunner, read_blocks

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.fixture
def scratch(tmp_path):
    """A folder as a user has it after cloning: the examples are there."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copytree(ROOT / "bench", tmp_path / "bench")
    return tmp_path


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_runs(page, scratch):
    runner = PageRunner(scratch, {})
    for block in read_blocks(page):
        runner.run(block)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_and_images_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert target.startswith("http") or (page.parent / target).exists(), f"{page.name} links to {target}"


def write(folder, text):
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_a_command_that_is_refused_fails_its_page(tmp_path):
    page = write(tmp_path, "```sh\ngroupwise place --conditions 3 --group-size 1 --ranks 2\n```\n")
    (block,) = read_blocks(page)
    with pytest.raises(AssertionError, match=r"(?s)page.md, line 1: .*exit code 2"):
        PageRunner(tmp_path, {}).run(block)
    PageRunner(tmp_path, {}).run(read_blocks(write(tmp_path, "<!-- test: exits 2 -->\n" + page.read_text()))[0])


def test_blocks_are_shrunken_and_share_their_names(tmp_path):
    page = write(
        tmp_path,
        "<!-- test: 10 ** 6 = 3; BIG = @words -->\n```python\nvalues = [0] * 10 ** 6\ntext = open('BIG').read()\n```\n"
        "```\nnot run\n```\n"
        "```python\nassert len(values) == 3 and text == 'x'\n```\n",
    )
    runner = PageRunner(tmp_path, {"words": lambda path: path.write_text("x")})
    for block in read_blocks(page):
        runner.run(block)
    assert [block.line for block in read_blocks(page)] == [2, 9]


def test_commands_cannot_hide_in_indented_blocks(tmp_path):
    with pytest.raises(AssertionError, match="fenced `sh` block"):
        read_blocks(write(tmp_path, "text\n\n    groupwise train chat\n"))
