"""Hooks of mkdocs: README.md is the first page, and links to files outside of docs/ become plain text."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]


def on_files(files: Files, config: Any) -> Files:
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    docs = (ROOT / "docs").resolve()
    folder = (docs / page.file.src_uri).parent

    def plain(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = (folder / target.partition("#")[0]).resolve()
        outside = not path.is_relative_to(docs) or not path.exists()
        return text if outside and not re.match(r"https?://|#", target) else link[0]

    return re.sub(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)", plain, markdown)
