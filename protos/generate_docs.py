"""Generates docs/api from the comments in the protos, or checks that the committed pages are up to date.

    python protos/generate_docs.py           writes docs/api/*.md
    python protos/generate_docs.py --check   writes nothing; exit 1 if the committed pages differ

A comment in a .proto is the one place where a field is described; these pages only make it readable.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from google.protobuf import descriptor_pb2 as pb

ROOT = Path(__file__).resolve().parent.parent
PROTO_ROOT = ROOT / "protos"
PAGES = ROOT / "docs" / "api"
PACKAGE = "cadenza.v1"
# In the order in which a reader wants them.
FILES = ("generation", "types", "admin", "execution", "planlog")
_Path = tuple[int, ...]
_Home = tuple[str, str]  # page and anchor of a message or an enum
_Field = pb.FieldDescriptorProto
# Field numbers in descriptor.proto: the steps of a path to a comment.
_FILE_MESSAGE, _FILE_ENUM, _FILE_SERVICE, _SYNTAX = 4, 5, 6, 12
_MESSAGE_FIELD, _MESSAGE_NESTED, _MESSAGE_ENUM, _MESSAGE_ONEOF = 2, 3, 4, 8
_CHILD = 2  # of an enum: its values; of a service: its methods
_SCALARS = {number: name.removeprefix("TYPE_").lower() for name, number in _Field.Type.items()}


def descriptors() -> list[pb.FileDescriptorProto]:
    """The parsed protos with their comments, in the order of FILES."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "set.binpb"
        names = [f"cadenza/v1/{name}.proto" for name in FILES]
        options = [f"-I{PROTO_ROOT}", "--include_source_info", f"--descriptor_set_out={out}"]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *options, *names], check=True, cwd=PROTO_ROOT)
        found = pb.FileDescriptorSet.FromString(out.read_bytes())
    by_name = {file.name: file for file in found.file}
    return [by_name[name] for name in names]


class Page:
    """One proto file as a page of Markdown."""

    def __init__(self, file: pb.FileDescriptorProto, homes: dict[str, _Home]) -> None:
        self.name = Path(file.name).stem
        self._file = file
        self._homes = homes
        self._comments = {
            tuple(location.path): " ".join(location.leading_comments.split())
            for location in file.source_code_info.location
            if location.leading_comments
        }

    def text(self) -> str:
        """The whole page."""
        head = f"# {self.name}.proto\n\n{self._comment((_SYNTAX,))}\n\n"
        note = f"Package `{PACKAGE}`. Made by `make protos` from the comments in `protos/{self._file.name}`.\n"
        return head + note + "".join(f"\n{section}" for section in self._sections())

    def _sections(self) -> Iterator[str]:
        for index, service in enumerate(self._file.service):
            yield self._service(service, (_FILE_SERVICE, index))
        for index, message in enumerate(self._file.message_type):
            yield from self._message(message, (_FILE_MESSAGE, index), "")
        for index, enum in enumerate(self._file.enum_type):
            yield self._enum(enum, (_FILE_ENUM, index), "")

    def _comment(self, path: _Path) -> str:
        return self._comments.get(path, "")

    def _service(self, service: pb.ServiceDescriptorProto, path: _Path) -> str:
        rows = [
            f"| `{method.name}` | {self._stream(method.client_streaming)}{self._link(method.input_type)} "
            f"| {self._stream(method.server_streaming)}{self._link(method.output_type)} "
            f"| {self._comment((*path, _CHILD, index))} |"
            for index, method in enumerate(service.method)
        ]
        return self._block(f"service {service.name}", path, ["rpc", "request", "response", ""], rows)

    def _message(self, message: pb.DescriptorProto, path: _Path, outer: str) -> Iterator[str]:
        name = outer + message.name
        rows = [
            f"| {field.number} | `{field.name}` | {self._type(message, field)} | {self._field_text(message, path, i)} |"
            for i, field in enumerate(message.field)
        ]
        yield self._block(name, path, ["no.", "field", "type", ""], rows)
        for index, nested in enumerate(message.nested_type):
            if not nested.options.map_entry:
                yield from self._message(nested, (*path, _MESSAGE_NESTED, index), f"{name}.")
        for index, enum in enumerate(message.enum_type):
            yield self._enum(enum, (*path, _MESSAGE_ENUM, index), f"{name}.")

    def _enum(self, enum: pb.EnumDescriptorProto, path: _Path, outer: str) -> str:
        rows = [
            f"| {value.number} | `{value.name}` | {self._comment((*path, _CHILD, index))} |"
            for index, value in enumerate(enum.value)
        ]
        return self._block(f"enum {outer}{enum.name}", path, ["no.", "value", ""], rows)

    def _block(self, title: str, path: _Path, columns: list[str], rows: list[str]) -> str:
        lines = [f"## {title}", "", self._comment(path), ""]
        if rows:
            lines += [f"| {' | '.join(columns)} |".replace("|  |", "| |"), "|" + "---|" * len(columns), *rows, ""]
        return "\n".join(lines)

    def _field_text(self, message: pb.DescriptorProto, path: _Path, index: int) -> str:
        field, text = message.field[index], self._comment((*path, _MESSAGE_FIELD, index))
        if not field.HasField("oneof_index") or field.proto3_optional:
            return text
        return f"{text} One of `{message.oneof_decl[field.oneof_index].name}`."

    def _type(self, message: pb.DescriptorProto, field: _Field) -> str:
        entry = next((n for n in message.nested_type if n.options.map_entry and field.type_name.endswith(n.name)), None)
        if entry is not None:
            return f"map of {self._type(entry, entry.field[0])} to {self._type(entry, entry.field[1])}"
        text = self._link(field.type_name) if field.type_name else f"`{_SCALARS[field.type]}`"
        if field.label == _Field.LABEL_REPEATED:
            return f"repeated {text}"
        return f"optional {text}" if field.proto3_optional else text

    def _link(self, type_name: str) -> str:
        """`.cadenza.v1.Name` as a link to its section."""
        name = type_name.removeprefix(f".{PACKAGE}.")
        home = self._homes.get(name)
        if home is None:
            return f"`{type_name.removeprefix('.')}`"
        page, anchor = home
        return f"[{name}]({'' if page == self.name else f'{page}.md'}#{anchor})"

    def _stream(self, streaming: bool) -> str:
        return "stream of " if streaming else ""


def _homes(files: list[pb.FileDescriptorProto]) -> dict[str, _Home]:
    """Where each message and enum is described, by name."""
    homes: dict[str, _Home] = {}

    def note(page: str, name: str, title: str) -> None:
        homes[name] = page, re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-")

    def walk(page: str, message: pb.DescriptorProto, outer: str) -> None:
        note(page, outer + message.name, outer + message.name)
        for enum in message.enum_type:
            note(page, f"{outer}{message.name}.{enum.name}", f"enum {outer}{message.name}.{enum.name}")
        for nested in message.nested_type:
            walk(page, nested, f"{outer}{message.name}.")

    for file in files:
        page = Path(file.name).stem
        for message in file.message_type:
            walk(page, message, "")
        for enum in file.enum_type:
            note(page, enum.name, f"enum {enum.name}")
    return homes


def pages() -> dict[str, str]:
    """All pages: file name to text."""
    files = descriptors()
    made = [Page(file, _homes(files)) for file in files]
    index = [
        "# The API",
        "",
        "What may be said on the wire, from the protos; [the protocols](../protocol.md) says what it means.",
        "",
    ]
    for page, file in zip(made, files, strict=True):
        services = ", ".join(f"`{service.name}`" for service in file.service)
        index.append(
            f"- [{page.name}.proto]({page.name}.md): {page._comment((_SYNTAX,))}{f' {services}.' if services else ''}"
        )
    return {"README.md": "\n".join(index) + "\n", **{f"{page.name}.md": page.text() for page in made}}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare only; write nothing")
    check = parser.parse_args().check
    fresh = pages()
    committed = {path.name: path.read_text(encoding="utf-8") for path in PAGES.glob("*.md")}
    if check:
        stale = sorted(name for name in fresh.keys() | committed.keys() if fresh.get(name) != committed.get(name))
        if stale:
            print(f"docs/api is out of date ({', '.join(stale)}): run `make protos`")
        return 1 if stale else 0
    PAGES.mkdir(parents=True, exist_ok=True)
    for name in committed.keys() - fresh.keys():
        (PAGES / name).unlink()
    for name, text in fresh.items():
        (PAGES / name).write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
