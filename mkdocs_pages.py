"""What `make site` does to pages before mkdocs builds them: a hook of mkdocs, and an extension of griffe.

Pages link to each other, and to code, as files of the repository, so that they can be read there. The hook adds the
pages of the root (README is the first page of the site). A link to a file that is no page leads into the repository if
`repo_url` says where that is, and else becomes its text. Docstrings describe each parameter on lines of its own, which
Markdown joins: the extension makes paragraphs of them.
"""

from __future__ import annotations

import logging
import os
import posixpath
import re
from pathlib import Path
from typing import Any

import griffe
from mkdocs.structure.files import File

ROOT = Path(__file__).parent
PAGES = {
    "README.md": "index.md",
    **{name: name for name in ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")},
}
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s#]+)(#[^)\s]*)?\)")

NOTEBOOK_LINK = re.compile(r'href="(?!\w+:)([^"#]+\.md)(#[^"]*)?"')
LOG = logging.getLogger("mkdocs.hooks.mkdocs_pages")


def on_files(files: Any, config: Any) -> Any:
    """Adds the pages of the root."""
    for name, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The page with links between pages of the site."""
    uri = page.file.src_uri
    of_root = {uri: name for name, uri in PAGES.items()}
    here = posixpath.dirname(of_root.get(uri, f"docs/{uri}"))

    def in_site(link: re.Match[str]) -> str:
        picture, text, target, anchor = link.groups(default="")
        path = posixpath.normpath(posixpath.join(here, target))
        to = PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(to) is not None:
            relative = posixpath.relpath(to, posixpath.dirname(uri) or ".")
            return f"{picture}[{text}]({relative}{anchor})"
        if not os.path.exists(ROOT / path):
            return link[0]  # `--strict` names it
        if config.repo_url:
            return f"[{text}]({config.repo_url.rstrip('/')}/blob/HEAD/{path}{anchor})"
        return text

    return LINK.sub(in_site, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """A notebook, which comes as HTML, with links to pages of the site; `--strict` ends at one that leads nowhere."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    here = posixpath.dirname(page.file.src_uri)

    def in_site(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(here, link[1]))
        if files.get_file_from_path(path) is None:
            LOG.warning("%s links to %s, which is no page", page.file.src_uri, link[1])
        return f'href="{link[1].removesuffix(".md")}.html{link[2] or ""}"'

    return NOTEBOOK_LINK.sub(in_site, html)


class Parameters(griffe.Extension):
    """A paragraph for each parameter that a docstring describes (`name: what it is`), with its name in bold."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites the docstring of a function, of a class with its fields, or of an overloaded function."""
        if obj.docstring is None:
            return
        if isinstance(obj, griffe.Function):
            names = {parameter.name.lstrip("*") for parameter in obj.parameters}
        elif isinstance(obj, griffe.Class):
            names = set(obj.members)
            if "__init__" in names and isinstance(made := obj.members["__init__"], griffe.Function):
                names |= {parameter.name for parameter in made.parameters}
        else:
            return
        if names:
            choice = "|".join(map(re.escape, sorted(names)))
            head = re.compile(rf"^({choice}): ", re.MULTILINE)
            obj.docstring.value = head.sub(r"\n**`\1`**: ", obj.docstring.value)
