"""Writes docs/api.md from the docstrings of the public names, and checks every link and reference in the documentation.

    python docs/build_api.py

A public name is what a module of ``MODULES`` lists in ``__all__``. A name that several modules list is described under the
first of them. The exit code is 1, with one line a warning, when a public name has no docstring, a reference such as
``:func:`mha``` names nothing, or a relative link points nowhere; api.md is written all the same.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
MODULES = (
    "specops",
    "specops.ops",
    "specops.compile",
    "specops.spec",
    "specops.models",
    "specops.parallel",
    "specops.testing",
)

_ROLE = re.compile(r":(?:func|class|meth|mod|attr|data|exc):`([^`]+)`")
_SECTION = re.compile(r"^(Args|Returns|Raises|Yields|Attributes|Example|Examples|Note|Notes):$")
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def slug(heading: str) -> str:
    """The anchor GitHub gives a heading."""
    kept = re.sub(r"[^\w\- ]", "", heading.replace("`", "").lower())
    return kept.strip().replace(" ", "-")


def broken_links(page: Path) -> list[str]:
    """Relative links of a page that point to no file, or to no heading of a Markdown file."""
    broken = []
    for target in _LINK.findall(_FENCE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists():
            broken.append(f"{page.relative_to(ROOT)}: {target} does not exist")
        elif anchor and file.suffix == ".md" and anchor not in _anchors(file):
            broken.append(f"{page.relative_to(ROOT)}: {target} names no heading")
    return broken


def _anchors(page: Path) -> set[str]:
    return {slug(title) for title in re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text()), re.MULTILINE)}


def pages() -> list[Path]:
    """Every page of the documentation, the README first."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


class Api:
    """The text of api.md and what is wrong with the docstrings it comes from.

    Attributes:
        warnings: one line a fault.
        text: the page.
        names: how many public names it describes.
    """

    def __init__(self) -> None:
        self.warnings: list[str] = []
        self.names = 0
        self._home: dict[int, str] = {}
        lines = [
            "# API",
            "",
            "Written by `make docs` from the docstrings: edit those. Tensor shapes stand in brackets: `B` requests, `T`",
            "query rows, `Hq` query heads, `Hkv` KV heads, `D` head dim, `P` pages of `S` tokens.",
            "",
        ]
        modules = {name: importlib.import_module(name) for name in MODULES}
        lines += [f"* [{name}](#{slug(name)}): {_summary(module)}" for name, module in modules.items()]
        for name, module in modules.items():
            lines += ["", f"## {name}", "", *self._prose(inspect.getdoc(module) or "", module, None)]
            for public in module.__all__:
                lines += self._entry(name, module, public)
        self.text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"

    def _entry(self, module_name: str, module: Any, public: str) -> list[str]:
        value, full = getattr(module, public), f"{module_name}.{public}"
        if inspect.ismodule(value):
            return ["", f"`{full}` is the module [{value.__name__}](#{slug(value.__name__)})."]
        if id(value) in self._home:
            home = self._home[id(value)]
            return ["", f"`{full}` is [{home}](#{slug(home)})."]
        self._home[id(value)] = full
        self.names += 1
        doc, owner = _own_doc(value, module, public), inspect.getmodule(value) or module
        if not doc:
            self.warnings.append(f"{full} has no docstring")
        lines = ["", f"### {full}", ""]
        if inspect.isclass(value) or inspect.isroutine(value):
            kind = "class " if inspect.isclass(value) else ""
            if not (inspect.isclass(value) and issubclass(value, BaseException)):
                lines += ["```text", f"{kind}{public}{_signature(value)}", "```", ""]
            lines += self._prose(doc, owner, value if inspect.isclass(value) else None)
            lines += self._members(value, owner) if inspect.isclass(value) else []
        else:
            lines += self._prose(doc, owner, None)
        return lines

    def _members(self, cls: type, owner: Any) -> list[str]:
        lines = []
        for name, raw in vars(cls).items():
            function = raw.fget if isinstance(raw, property) else getattr(raw, "__func__", raw)
            if name.startswith("_") or name == "extra_repr" or not inspect.isfunction(function):
                continue
            shown = "" if isinstance(raw, property) else _signature(function)
            lines += ["", f"`{cls.__name__}.{name}{shown}`", "", *self._prose(inspect.getdoc(function) or "", owner, cls)]
        return lines

    def _prose(self, doc: str, owner: Any, cls: type | None) -> list[str]:
        """A docstring as Markdown: sections as bold words over lists, code indented by the author left as it is."""

        def reference(match: re.Match[str]) -> str:
            name = match[1].lstrip("~")
            if not _resolves(name, owner, cls):
                self.warnings.append(f"{owner.__name__}: reference to {name}, which does not exist")
            return f"`{name}`"

        text = re.sub(r"``([^`]+)``", r"`\1`", _ROLE.sub(reference, doc)).replace("::\n", ":\n")
        lines, in_section = [], False
        for line in text.splitlines():
            section = _SECTION.match(line)
            if section:
                in_section = True
                lines += ["", f"**{section[1]}**", ""]
            elif in_section and re.match(r"    [\w*, ]+: ", line):
                name, _, rest = line.strip().partition(": ")
                lines.append(f"* `{name}`: {rest}")
            elif in_section and line.startswith("    "):
                lines.append(f"  {line.strip()}")
            else:
                in_section = in_section and not line
                lines.append(line)
        return lines


def _summary(module: Any) -> str:
    first = (inspect.getdoc(module) or "").splitlines()[0]
    return re.sub(r"``([^`]+)``", r"`\1`", first.removeprefix(f"{module.__name__}: "))


def _signature(value: Any) -> str:
    """Parameters as one line: without self, addresses, and the quotes of annotations that are text."""
    text = re.sub(r" at 0x[0-9a-f]+", "", str(inspect.signature(value)))
    text = re.sub(r"(: |-> )(['\"])(.+?)\2(?=, | = |\)|$)", r"\1\3", text)
    return re.sub(r"^\((?:self|cls)(?:, )?", "(", text)


def _own_doc(value: Any, module: Any, public: str) -> str:
    """A name's own docstring: that of a class's base does not count; for data, the comment lines above its assignment."""
    if inspect.isclass(value):
        return inspect.cleandoc(value.__dict__.get("__doc__") or "")
    if inspect.isroutine(value):
        return inspect.getdoc(value) or ""
    for other in {id(m): m for m in (module, *map(sys.modules.get, _imported_from(module)))}.values():
        if other is not None and (comment := _comments(other.__file__).get(public)):
            return comment
    return ""


def _imported_from(module: Any) -> list[str]:
    """Modules named by ``from ... import``, those that are imported at first use among them."""
    nodes = ast.walk(ast.parse(inspect.getsource(module)))
    return [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module]


@cache
def _comments(file: str) -> dict[str, str]:
    """Comment lines right above each assignment at the top level of a file."""
    source = Path(file).read_text()
    lines, found = source.splitlines(), {}
    for node in ast.parse(source).body:
        target = (
            node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(node, ast.Assign) else None
        )
        if isinstance(target, ast.Name):
            row, above = node.lineno - 2, []
            while row >= 0 and lines[row].startswith("#"):
                above.insert(0, lines[row].lstrip("#: "))
                row -= 1
            found[target.id] = "\n".join(above)
    return found


def _resolves(name: str, owner: Any, cls: type | None) -> bool:
    """Whether a reference names something: in its class, in its module, or by its full path."""
    parts = name.split(".")
    package = sys.modules.get(owner.__name__.rpartition(".")[0])
    for scope in (cls, owner, package):
        value: Any = scope
        for part in parts:
            value = getattr(value, part, None)
        if scope is not None and value is not None:
            return True
    for cut in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:cut]))
        except ImportError:
            continue
        for part in parts[cut:]:
            value = getattr(value, part, None)
        return value is not None
    return False


def main() -> int:
    """Write api.md and print the warnings; the exit code is 1 if there are any."""
    api = Api()
    (ROOT / "docs" / "api.md").write_text(api.text)
    warnings = api.warnings + [line for page in pages() for line in broken_links(page)]
    for line in warnings:
        print(f"warning: {line}")
    print(f"docs/api.md: {api.names} names; {len(pages())} pages; {len(warnings) or 'no'} warnings")
    return 1 if warnings else 0


if __name__ == "__main__":
    sys.exit(main())
