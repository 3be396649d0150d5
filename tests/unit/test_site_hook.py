"""The changes of ``tools/site_hook.py`` to pages and docstrings for the documentation site."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from tests.support.configs import ROOT
from tests.support.tools import load_tool

griffe = pytest.importorskip("griffe")  # make docs installs it


@pytest.fixture(scope="module")
def hook() -> ModuleType:
    return load_tool("site_hook")


def page(path: str) -> SimpleNamespace:
    return SimpleNamespace(file=SimpleNamespace(src_uri=path), meta={})


def test_pages_of_the_reference_are_found_below_the_guides(hook: ModuleType) -> None:
    pages = [page("reference/loss.md"), page("data.md")]
    for found in pages:
        hook.on_page_markdown("", found)
    assert [found.meta for found in pages] == [{"search": {"boost": 0.2}}, {}]


def test_the_name_of_a_page_becomes_a_link_but_not_in_code(hook: ModuleType) -> None:
    text = "See `docs/metrics.md` (docs/data.md), [here](docs/data.md).\n```\ndocs/data.md\n```\n"
    expected = "See [Metrics](../metrics.md) ([Data](../data.md)), [here](docs/data.md).\n```\ndocs/data.md\n```\n"
    assert hook.on_page_markdown(text, page("tutorials/x.md")) == expected
    assert "[Data](data.md)" in hook.on_page_markdown(text, page("x.md"))


def test_examples_are_on_the_site_and_linked_where_they_are_named(hook: ModuleType) -> None:
    text = 'See `examples/my_data.py`.\n```python title="examples/my_tools.py"\nx\n```\n'
    linked = hook.on_page_markdown(text, page("tutorials/x.md"))
    assert linked.startswith("See [`examples/my_data.py`](../examples/my_data.py).")
    assert linked.endswith(
        "\n```\n\nThe whole file: [examples/my_tools.py](../examples/my_tools.py)\n"
    )
    files = hook.on_files([], config=SimpleNamespace(site_dir="site", use_directory_urls=False))
    assert {file.url for file in files} == {
        f"examples/{path.name}" for path in (ROOT / "examples").glob("*.*")
    }


def test_the_number_of_a_paper_becomes_a_link(hook: ModuleType) -> None:
    text = "arXiv:2402.03300, 12.0123, 3.1402.03300, [x](https://arxiv.org/abs/2402.03300)."
    linked = text.replace(
        "arXiv:2402.03300,", "arXiv:[2402.03300](https://arxiv.org/abs/2402.03300),"
    )
    assert hook.on_page_markdown(text, page("x.md")) == linked


def test_escaped_bars_are_plain_in_the_code_of_tables_alone(hook: ModuleType) -> None:
    text = "| `a\\|b` \\| c |\n`a\\|b`"
    assert hook.on_page_markdown(text, page("x.md")) == "| `a|b` \\| c |\n`a\\|b`"


def test_directives_of_the_reference_leave_their_comment(hook: ModuleType) -> None:
    text = "# X\n\n<!-- a note -->\n\n<!--\n::: a.B\n    options: {}\n\n::: a.C\n-->\n"
    expected = "# X\n\n<!-- a note -->\n\n::: a.B\n    options: {}\n\n::: a.C\n\n"
    assert hook.on_page_markdown(text, page("x.md")) == expected


def test_a_page_that_fetches_something_ends_the_build(hook: ModuleType) -> None:
    fetched = [
        '<script src="https://a.b/c.js">',
        "<img alt=x src=//a.b/c>",
        '<link rel="stylesheet" href=http://a>',
    ]
    for part in fetched:
        with pytest.raises(ValueError, match=r"x\.md must be readable offline"):
            hook.on_post_page(part, page("x.md"))
    for part in (
        '<a href="https://a.b">',
        '<script src="c.js">',
        '<link rel="canonical" href="https://a">',
    ):
        hook.on_post_page(part, page("x.md"))


def test_examples_without_a_section_get_one(hook: ModuleType) -> None:
    changed = SimpleNamespace(docstring=griffe.Docstring("Adds.\n\n>>> 1 + 1\n2"))
    hook.BareExamples().on_object(obj=changed)
    assert changed.docstring.value == "Adds.\n\nExamples:\n    >>> 1 + 1\n    2"
