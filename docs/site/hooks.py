"""What MkDocs does beyond showing the pages of docs/: it includes what is written elsewhere in the repository.

- Pages of the repository (README, ARCHITECTURE, the packages' READMEs and changelogs, ...) become pages of the site.
  Links between all of them lead to the right page; a link to any other file of the repository shows that file.
- A line `<!-- accel: NAME -->` is replaced by what `generated.NAME()` makes from the source.
- Each part of a package gets a page of the Python reference. A public name without a docstring is a warning, which
  ends a strict build; so is a package whose docstrings leave out more arguments and results than it may.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

sys.path.insert(0, str(Path(__file__).parent))
import generated
import plots
import reference
import searches

ROOT = Path(__file__).resolve().parents[2]
log = logging.getLogger("mkdocs.hooks.accel")

PAGES = {
    "README.md": "project/overview.md",
    "ARCHITECTURE.md": "project/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "SECURITY.md": "project/security.md",
    "benchmarks/RESULTS.md": "project/measurements.md",
    "docs/guides/notebook.ipynb": "guides/notebook.md",
} | {
    f"packages/{folder.name}/{name}": f"packages/{folder.name}/{page}"
    for folder in sorted((ROOT / "packages").iterdir())
    for name, page in (("README.md", "index.md"), ("CHANGELOG.md", "changelog.md"))
}
"""Pages that lie elsewhere in the repository, and where they are on the site."""

_LINK = re.compile(r"\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")
_MARK = re.compile(r"^<!-- accel: (\w+) -->$", re.MULTILINE)
_FENCE = re.compile(r"^( *)(```|~~~).*?^\1\2$", re.MULTILINE | re.DOTALL)
_LINE = re.compile(r'(<span id="__span-[\d-]+")>(?:( +)|<span class="w">( +)</span>)')
_LANGUAGES = {".py": "python", ".json": "json", ".toml": "toml", ".sh": "bash", ".yaml": "yaml", ".txt": "text"}

_sources: dict[str, str] = {}  # page of the site -> path in the repository, for pages that do not lie in docs/


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Put the pages that are made from the source where the navigation names them."""
    generated.make_importable()
    made = {"@api": reference.navigation(), "@packages": _packages()}
    config.nav = _expanded(config.nav, made)
    return config


def _expanded(entry: Any, made: dict[str, list[Any]]) -> Any:
    if isinstance(entry, list):
        return [_expanded(item, made) for item in entry]
    if isinstance(entry, dict):
        return {title: _expanded(item, made) for title, item in entry.items()}
    return made.get(entry, entry)


def _packages() -> list[Any]:
    folders = sorted({PurePosixPath(page).parent.name for page in PAGES.values() if page.startswith("packages/")})
    return [{name: [f"packages/{name}/index.md", {"Changes": f"packages/{name}/changelog.md"}]} for name in folders]


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/, and mend the theme's search."""
    for file in files:
        if re.fullmatch(r"assets/javascripts/workers/search\.\w+\.min\.js", file.src_uri):
            file.content_string = searches.mended(file.content_string)
    _sources.clear()
    for source, page in PAGES.items():
        text = (ROOT / source).read_text()
        _add(files, config, page, _notebook(text) if source.endswith(".ipynb") else text, source)
    for page, text in reference.pages().items():
        _add(files, config, page, text)
    for source in sorted(_linked_files(files)):
        _add(files, config, f"source/{source}.md", _listing(source), source)
        files.get_file_from_path(f"source/{source}.md").inclusion = generated.NOT_IN_NAV
    for problem in reference.problems():
        log.warning(problem)
    return files


def _notebook(text: str) -> str:
    """Return the cells of a notebook as a page, with what they printed."""
    parts = []
    for cell in json.loads(text)["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        parts += [f"```text\n{''.join(output['text']).rstrip()}\n```" for output in cell.get("outputs", ())]
    return "\n\n".join(parts)


def _add(files: Files, config: MkDocsConfig, page: str, text: str, source: str = "") -> None:
    files.append(File.generated(config, page, content=text))
    if source:
        _sources[page] = source


def _linked_files(files: Files) -> set[str]:
    """Return the files of the repository that pages link to and that are not pages themselves."""
    found = set()
    for file in files.documentation_pages():
        if file.src_uri.startswith("reference/api/"):
            continue
        place = _place(file.src_uri)
        for match in _LINK.finditer(file.content_string):
            target = _resolved(place, match[2])
            if target and target not in PAGES and not target.startswith("docs/") and (ROOT / target).is_file():
                found.add(target)
    return found


def _listing(source: str) -> str:
    language = _LANGUAGES.get(PurePosixPath(source).suffix, "text")
    text = (ROOT / source).read_text()
    return f"# {source}\n\n~~~~{language}\n{text}\n~~~~\n"


def _place(page: str) -> str:
    """Return where the text of a page lies in the repository."""
    return _sources.get(page, f"docs/{page}")


def _resolved(place: str, link: str) -> str | None:
    """Return what a relative link of a file leads to, from the root of the repository; None for other links."""
    if re.match(r"[a-z]+:|/", link):
        return None
    return os.path.normpath(PurePosixPath(place).parent / link).replace(os.sep, "/")


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is made from the source, and turn the repository's links into the site's."""
    page.meta.setdefault("search", _search(page.file.src_uri))
    if _shows_results(page):
        markdown = plots.added(markdown)
    markdown = _MARK.sub(lambda match: getattr(generated, match[1])(), markdown)
    place, here = _place(page.file.src_uri), PurePosixPath(page.file.src_uri).parent

    def linked(match: re.Match[str]) -> str:
        target = _resolved(place, match[2])
        if target is None:
            return match[0]
        uri = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
        if uri is None and match.string[match.start() - 1 : match.start()] == "!":
            return match[0]
        uri = uri or f"source/{target}.md"
        if files.get_file_from_path(uri) is None and (ROOT / target).exists():
            return f"`{target}`" if match[1].strip("`") == target else f"{match[1]} (`{target}`)"  # a folder
        return f"[{match[1]}]({os.path.relpath(uri, here)}{match[3] or ''})"

    parts, end = [], 0
    for block in _FENCE.finditer(markdown):
        parts += [_LINK.sub(linked, markdown[end : block.start()]), _colored(block[0])]
        end = block.end()
    return "".join([*parts, _LINK.sub(linked, markdown[end:])])


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Mark how far each line of code is indented, so that what wraps of it is indented further."""
    return _LINE.sub(
        lambda line: (
            f'{line[1]} style="--indent: {len(line[2] or line[3])}"><span class="accel-indent">'
            f"{line[2] or line[3]}</span>"
        ),
        html,
    )


def on_post_build(config: MkDocsConfig) -> None:
    """Rank what the search finds; warn of what readers search for and do not find."""
    exported = {name for names in reference.flat_names().values() for name in names}
    searches.rank_api(Path(config.site_dir) / "search" / "search_index.json", exported)
    for problem in searches.problems(Path(config.site_dir)):
        log.warning(problem)


def _search(page: str) -> dict[str, Any]:
    """Return how a search treats a page: it finds what explains a thing before what lists it, and nothing internal."""
    if page.startswith(("source/", "packages/", "project/")) or page in reference.internal():
        return {"exclude": True}
    boosts = {
        "guides/how-do-i": 4.0,
        "guides/continuing": 3.0,  # "checkpoint"
        "guides/": 2.0,
        "tutorials/": 1.5,
        "reference/launchers": 0.3,
    }
    return {"boost": next((boost for start, boost in boosts.items() if page.startswith(start)), 1.0)}


def _shows_results(page: Page) -> bool:
    """Return whether a page shows what was measured."""
    return _sources.get(page.file.src_uri) == "benchmarks/RESULTS.md"


def _colored(block: str) -> str:
    """Return a block of code; commands without a prompt would be colored as the output of a session."""
    if "```console" in block and not re.search(r"^ *\$ ", block, re.MULTILINE):
        return block.replace("```console", "```bash", 1)
    return block
