"""Make a checkout ready to be published: its README and pyproject.toml get the repository's address.

    python tools/prepare_release.py https://github.com/OWNER/NAME v0.2.0

README.md links into the repository, and on a package index such links lead nowhere. No file names the repository's
address: `.github/workflows/release.yml` knows it, and gives it to this script before it builds. Publish nothing
without it, and do not commit what it changes.
"""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https://|#)([^)]+)\)")
"""A link or an image of Markdown that leads into the repository."""


def absolute(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose links into the repository lead to these files of a tag."""

    def link(match: re.Match[str]) -> str:
        image, label, path = match.groups()
        return f"{image}[{label}]({repository}/{'raw' if image else 'blob'}/{tag}/{path})"

    return LINK.sub(link, text)


def urls(repository: str, tag: str) -> str:
    """Return the table ``[project.urls]`` of pyproject.toml."""
    pages = {
        "Repository": repository,
        "Documentation": f"{repository}/blob/{tag}/docs/index.md",
        "Changelog": f"{repository}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
    }
    lines = (f'{name} = "{url}"\n' for name, url in pages.items())
    return f"\n[project.urls]\n{''.join(lines)}"


def check_tag(tag: str, pyproject: str, changelog: str) -> None:
    """Check that a tag is that of the package's version, which the changelog describes.

    Raises:
        ValueError: it is not.
    """
    version = tomllib.loads(pyproject)["project"]["version"]
    if tag != f"v{version}":
        raise ValueError(f"tag {tag} must be v{version}, the version in pyproject.toml.")
    if not re.search(rf"^## {re.escape(version)} - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE):
        raise ValueError(f"CHANGELOG.md must have a heading '## {version} - DATE' for tag {tag}.")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("repository", help="address of the repository, without a slash at its end")
    parser.add_argument("tag", help="tag of the release: v and the version")
    options = parser.parse_args()
    readme, pyproject = ROOT / "README.md", ROOT / "pyproject.toml"
    text = pyproject.read_text(encoding="utf-8")
    check_tag(options.tag, text, (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))
    pyproject.write_text(text + urls(options.repository, options.tag), encoding="utf-8")
    page = readme.read_text(encoding="utf-8")
    readme.write_text(absolute(page, options.repository, options.tag), encoding="utf-8")


if __name__ == "__main__":
    main()
