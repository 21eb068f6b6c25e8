"""Makes the docs' site whole: the README is its first page, and no link leads out of it.

`mkdocs.yml` names this file. What lies in the repository and not on the site keeps its words and
loses its link; `make site` fails for any other link or anchor that leads nowhere.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "ARCHITECTURE.md": "architecture.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Adds the pages that lie beside docs/."""
    for source, page in PAGES.items():
        text = relinked((ROOT / source).read_text(), source, page)
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points links at what is on the site."""
    uri = page.file.src_uri
    return markdown if uri in PAGES.values() else relinked(markdown, f"docs/{uri}", uri)


def relinked(text: str, source: str, page: str) -> str:
    """The text of a file of the repository as the page of the site that it becomes."""

    def link(found: re.Match[str]) -> str:
        mark, words, target, anchor = found.groups()
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
        on_site = PAGES.get(place) or (
            place.removeprefix("docs/") if place.startswith("docs/") else None
        )
        if on_site is None:
            return str(words)
        relative = posixpath.relpath(on_site, posixpath.dirname(page) or ".")
        return f"{mark}[{words}]({relative}{anchor or ''})"

    return LINK.sub(link, text)
