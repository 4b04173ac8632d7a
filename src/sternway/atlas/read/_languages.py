"""A file's language, from its name alone, and the parser for it."""

from __future__ import annotations

from typing import NamedTuple


class Language(NamedTuple):
    name: str
    parser: str  # "ast", "tree-sitter", "ctags", "keys" or "words"
    lexer: str  # pygments' name for it


_PYTHON = Language("Python", "ast", "python")
_C = Language("C", "tree-sitter", "c")
_CPP = Language("C++", "tree-sitter", "cpp")
_CUDA = Language("CUDA", "tree-sitter", "cuda")
_BY_SUFFIX = {
    ".py": _PYTHON,
    ".pyi": _PYTHON,
    ".pyw": _PYTHON,
    ".c": _C,
    ".h": _CPP,
    **dict.fromkeys((".cc", ".cpp", ".cxx", ".hh", ".hpp", ".hxx", ".ipp", ".inl", ".inc"), _CPP),
    **dict.fromkeys((".cu", ".cuh"), _CUDA),
    ".m": Language("ObjectiveC", "ctags", "objective-c"),
    ".mm": Language("ObjectiveC", "ctags", "objective-c++"),
    ".java": Language("Java", "ctags", "java"),
    ".kt": Language("Kotlin", "ctags", "kotlin"),
    ".go": Language("Go", "ctags", "go"),
    ".rs": Language("Rust", "ctags", "rust"),
    **dict.fromkeys((".js", ".mjs", ".cjs", ".jsx"), Language("JavaScript", "tree-sitter", "javascript")),
    **dict.fromkeys((".ts", ".tsx"), Language("TypeScript", "tree-sitter", "typescript")),
    **dict.fromkeys((".sh", ".bash"), Language("Sh", "ctags", "bash")),
    ".rb": Language("Ruby", "ctags", "ruby"),
    ".lua": Language("Lua", "ctags", "lua"),
    ".jl": Language("Julia", "ctags", "julia"),
    ".f90": Language("Fortran", "ctags", "fortran"),
    ".proto": Language("Protobuf", "ctags", "protobuf"),
    ".cmake": Language("CMake", "ctags", "cmake"),
    ".sql": Language("SQL", "ctags", "sql"),
    ".css": Language("CSS", "ctags", "css"),
    **dict.fromkeys((".yaml", ".yml"), Language("YAML", "keys", "yaml")),
    ".toml": Language("TOML", "keys", "toml"),
    ".json": Language("JSON", "keys", "json"),
    ".md": Language("Markdown", "words", "markdown"),
    ".rst": Language("reStructuredText", "words", "rst"),
    ".html": Language("HTML", "words", "html"),
    ".ini": Language("INI", "words", "ini"),
    ".cfg": Language("INI", "words", "ini"),
    ".txt": Language("text", "words", ""),
}
_BY_NAME = {
    "CMakeLists.txt": Language("CMake", "ctags", "cmake"),
    "Makefile": Language("Make", "ctags", "make"),
    "Dockerfile": Language("Dockerfile", "words", "docker"),
}
_OTHER = Language("text", "words", "")


def language_of(path: str) -> Language:
    """The language of a path.

    Example:
        >>> language_of("kernels/add.cu").name, language_of("LICENSE").parser
        ('CUDA', 'words')
    """
    name = path.rpartition("/")[2]
    dot = name.rfind(".")
    return _BY_NAME.get(name) or _BY_SUFFIX.get(name[dot:].lower() if dot > 0 else "", _OTHER)
