"""The long description of the package: README, with links that work on the page of an index.

An index shows README alone. A relative link leads nowhere there, so it becomes one into the repository, at the tag of
the version. Without `Source` in `[project.urls]` no such address is known: then a link is its text, and a picture is
left out.
"""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!\w+:|#)([^)\s]+)\)")


def long_description(readme: str, source: str | None, version: str) -> str:
    """`readme` with absolute links into the repository `source`, or without relative links where there is none."""

    def absolute(link: re.Match[str]) -> str:
        picture, text, target = link.groups()
        if source is None:
            return "" if picture else text
        view = "raw" if picture else "blob"  # the paths that GitHub has, and GitLab redirects
        return f"{picture}[{text}]({source.rstrip('/')}/{view}/v{version}/{target})"

    return LINK.sub(absolute, readme)


if __name__ == "__main__":
    from setuptools import setup  # here, the tests of this file need none of it

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "README.md").read_text()
    setup(
        long_description=long_description(
            text, project.get("urls", {}).get("Source"), project["version"]
        ),
        long_description_content_type="text/markdown",
    )
