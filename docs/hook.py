"""The hooks of mkdocs.yml: they build the site from the files of the repository, without copies.

README.md becomes the home page. The changelog, the examples and a few other files become pages, and
the help of commands is inserted. mkdocs checks links between pages of docs/.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
# {path in the repository: page on the site}
ADDED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "results/experiments.md",
    **{
        path.relative_to(ROOT).as_posix(): path.relative_to(ROOT).with_suffix(".md").as_posix()
        for path in (ROOT / "examples").rglob("*.py")
    },
}
ORIGINS = {page: path for path, page in ADDED.items()}
# A picture with a light and a dark version, as GitHub writes it. The theme selects a version by the
# ending of its link, #only-light or #only-dark.
PICTURE = re.compile(
    r'<picture><source [^>]*srcset="(?P<dark>[^"]*)">\n'
    r'<img alt="(?P<alt>[^"]*)" src="(?P<light>[^"]*)"></picture>'
)


def on_files(files, config):
    for path, page in ADDED.items():
        text = (ROOT / path).read_text()
        if path.endswith(".py"):
            text = f"---\nsearch: {{ exclude: true }}\n---\n# {path}\n\n```python\n{text}```\n"
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown, page, config, files):
    origin = ORIGINS.get(page.file.src_uri, f"docs/{page.file.src_uri}")
    markdown = PICTURE.sub(
        r"![\g<alt>](\g<light>#only-light)\n![\g<alt>](\g<dark>#only-dark)", markdown
    )
    if not origin.endswith(".py"):
        markdown = re.sub(
            r"(!?\[[^]]*\])\(([^)#\s]*)(#[^)]*)?\)",
            lambda link: _link(link, origin, page.file.src_uri),
            markdown,
        )
    markdown = re.sub(r"<!-- help: (.*?) -->", lambda found: _help(found[1]), markdown)
    return _spaced(markdown)


def _link(link, origin, page):
    """The link on the site, or only its text if the target is not a page there."""
    text, target, section = link[1], link[2], link[3] or ""
    if re.match(r"[a-z]+:", target) or not target:
        return link[0]
    path = os.path.normpath(os.path.join(os.path.dirname(origin), target))
    if not (ROOT / path).exists():
        raise PluginError(f"{origin}: links must lead to a file that exists, got {target!r}")
    if path.startswith("docs/") and origin.startswith("docs/"):
        return link[0]
    found = path.removeprefix("docs/") if path.startswith("docs/") else ADDED.get(path)
    if found is None:
        return text.strip("[]")
    return f"{text}({os.path.relpath(found, os.path.dirname(page) or '.')}{section})"


def _help(command):
    """The output of a command such as `python FOLDER/NAME.py --help`, as a code block."""
    done = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
    )
    if done.returncode:
        raise PluginError(f"{command}: {done.stderr}")
    return f"```text\n{done.stdout}```"


def _spaced(markdown):
    """Insert the empty lines before tables and lists that mkdocs needs."""
    lines, fenced = [], False
    for line in markdown.splitlines():
        fenced ^= line.startswith("```")
        before = lines[-1] if lines else ""
        for begins in (r"\|", r"(?:[-*]|\d+\.) "):
            starts = re.match(begins, line) and not re.match(begins, before)
            if starts and before.strip() and not before.startswith(" ") and not fenced:
                lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"
