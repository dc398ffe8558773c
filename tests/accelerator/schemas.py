"""Compares the schemas of the emulated operators with those in a wheel of the real torch_npu.

    pip download --no-deps torch-npu==2.13.0
    python -m tests.accelerator.schemas torch_npu-2.13.0-*.whl      exit code 1: one is not in the wheel

A schema is text in the wheel's library, where torch_npu registers it. Nothing of the wheel is run.
"""

from __future__ import annotations

import ast
import sys
import zipfile
from pathlib import Path

OPERATORS = Path(__file__).with_name("emulated") / "torch_npu" / "operators.py"
LIBRARY = "torch_npu/lib/libtorch_npu.so"


def emulated() -> list[str]:
    """The schemas of :data:`OPERATORS`, which cannot be imported without the device."""
    for node in ast.parse(OPERATORS.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "SCHEMAS":
            text = next(part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            return str(text).strip().splitlines()
    raise AssertionError("no SCHEMAS")


def of_wheel(library: bytes, name: str) -> list[str]:
    """The schemas of the operator ``name`` in the library: texts that end with a zero byte."""
    found = []
    start = 0
    while (start := library.find(f"{name}(".encode(), start)) >= 0:
        text = library[start : library.index(b"\0", start)].decode(errors="replace")
        if library[start - 1 : start] in (b"\0", b":") and " -> " in text:
            found.append(text)
        start += 1
    return sorted(set(found))


def main(wheel: str) -> int:
    library = zipfile.ZipFile(wheel).read(LIBRARY)
    different = 0
    for schema in emulated():
        name = schema.partition("(")[0]
        real = of_wheel(library, name)
        equal = schema in real
        different += not equal
        print(f"{name}: {'the same' if equal else 'different'}")
        if not equal:
            print(
                *(f"  the wheel: {each}" for each in real or ["(none)"]),
                f"  emulated:  {schema}",
                sep="\n",
            )
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
