"""What describes a release: the files agree, and the long description works where README alone is shown."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
README = (ROOT / "README.md").read_text()
long_description = runpy.run_path(str(ROOT / "setup.py"))["long_description"]


def test_a_citation_names_the_package_and_its_version() -> None:
    text = (ROOT / "CITATION.cff").read_text()
    fields = dict(re.findall(r"^(\w+): (.+)$", text, re.MULTILINE))
    assert (fields["title"], fields["version"]) == (PROJECT["name"], PROJECT["version"])
    assert fields["license"] == PROJECT["license"]
    assert re.findall(r"^  - name: (.+)$", text, re.MULTILINE) == [
        author["name"] for author in PROJECT["authors"]
    ]
    keywords = text.partition("keywords:\n")[2]
    assert re.findall(r"^  - (.+)$", keywords, re.MULTILINE) == PROJECT["keywords"]


def test_the_changelog_has_the_version() -> None:
    assert f"\n## [{PROJECT['version']}]" in (ROOT / "CHANGELOG.md").read_text()


def test_links_of_the_long_description_lead_into_the_repository() -> None:
    text = "[a](docs/a.md#b), [c](https://d.e/f), [g](#h)\n![p](docs/p.png)"
    assert long_description(text, "https://x.y/z/", "1.0") == (
        "[a](https://x.y/z/blob/v1.0/docs/a.md#b), [c](https://d.e/f), [g](#h)\n"
        "![p](https://x.y/z/raw/v1.0/docs/p.png)"
    )


def test_without_a_repository_it_has_no_links_that_lead_nowhere() -> None:
    assert long_description("see [a](b.md)\n![p](p.png)", None, "1.0") == "see a\n"
    text = long_description(README, PROJECT.get("urls", {}).get("Source"), PROJECT["version"])
    assert re.findall(r"\]\((?!https?:|#)[^)\s]*\)", text) == []
