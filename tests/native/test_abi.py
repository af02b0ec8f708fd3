"""The table's prototypes and the declarations of gpu_abi.h against the vendor's own headers.

The shim is built without a CUDA toolkit, from declarations of its own. Here both are compiled: a prototype
that differs does not compile, and two small programs, one including ours and one the vendor's header, print
the same sizes, offsets and values.
"""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from pycparser import c_ast, c_parser

SHIM = Path(__file__).resolve().parents[2] / "native" / "shim"
CC = shutil.which("gcc") or shutil.which("cc")

# Declared in headers of their own, which need OpenGL's and VDPAU's.
ELSEWHERE = {"cuGLCtxCreate", "cuGLCtxCreate_v2", "cuVDPAUCtxCreate", "cuVDPAUCtxCreate_v2"}

VENDOR = """
#define __CUDA_API_VERSION_INTERNAL
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include <cuda.h>
#include <nvml.h>
#include <stddef.h>
"""

pytestmark = pytest.mark.skipif(CC is None, reason="needs a C compiler")


@pytest.fixture(scope="session")
def vendor_include() -> list[str]:
    """Compiler arguments that find the vendor's cuda.h and nvml.h."""
    folders = set()
    for package, header in (("nvidia-cuda-runtime", "cuda.h"), ("nvidia-nvml-dev", "nvml.h")):
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            pytest.skip(f"needs {header} of the package {package}")
        folders.update(Path(str(file.locate())).parent for file in files if file.name == header)
    return [argument for folder in sorted(folders) for argument in ("-isystem", str(folder))]


def _rows() -> list[str]:
    return re.findall(
        r"^(?:HOOK|CALL)\((?:CUDA|NVML), (\w+),", (SHIM / "hooks.def").read_text(), re.MULTILINE
    )


def _compile(source: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = folder / "probe.c"
    path.write_text(source)
    command = [str(CC), "-std=gnu11", "-Wall", "-Werror", "-Wno-deprecated-declarations", str(path)]
    return subprocess.run([*command, *arguments], cwd=folder, capture_output=True, text=True, timeout=60)


def _prototypes(extra: str = "") -> str:
    """Each row after the vendor's own declaration: first that there is one, then ours again."""
    vdpau = "typedef unsigned VdpDevice; typedef int VdpGetProcAddress(VdpDevice, unsigned, void **);"
    lines = [VENDOR, vdpau]
    lines += [f"extern __typeof__({name}) {name};" for name in _rows() if name not in ELSEWHERE]
    lines += ["#define HOOK(library, symbol, result, params) result symbol params;", "#define CALL HOOK"]
    return "\n".join([*lines, f'#include "{SHIM / "hooks.def"}"', extra])


def test_prototypes_equal_the_vendors(tmp_path: Path, vendor_include: list[str]) -> None:
    """Every row of the table has the signature that cuda.h or nvml.h declares for that very symbol."""
    done = _compile(_prototypes(), tmp_path, "-fsyntax-only", *vendor_include)
    assert done.stderr == ""


def test_a_wrong_prototype_is_noticed(tmp_path: Path, vendor_include: list[str]) -> None:
    """The comparison can fail: one more argument does not compile."""
    wrong = "CUresult cuMemFree_v2(CUdeviceptr dptr, int more);"
    done = _compile(_prototypes(wrong), tmp_path, "-fsyntax-only", *vendor_include)
    assert re.search(r"conflicting types for .cuMemFree_v2", done.stderr)


# ---- gpu_abi.h -------------------------------------------------------------------------------------------


def _parse(tmp_path: Path) -> c_ast.FileAST:
    fake = tmp_path / "fake"
    fake.mkdir()
    (fake / "stddef.h").write_text("typedef unsigned long size_t;\n")
    names = [f"typedef unsigned {kind} uint{bits}_t;" for kind, bits in (("int", 32), ("long", 64))]
    (fake / "stdint.h").write_text("\n".join(names))
    command = [str(CC), "-E", "-P", "-nostdinc", "-I", str(fake), str(SHIM / "gpu_abi.h")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return c_parser.CParser().parse(done.stdout)


def _members(node: c_ast.Struct | c_ast.Union, prefix: str = "") -> list[str]:
    """Paths of all members, those of nested structures included."""
    paths = []
    for member in node.decls or []:
        inner = member.type.type if isinstance(member.type, c_ast.TypeDecl) else None
        nested = isinstance(inner, c_ast.Struct | c_ast.Union) and inner.decls
        if member.name:
            paths.append(prefix + member.name)
        if nested:
            paths += _members(inner, f"{prefix}{member.name}." if member.name else prefix)
    return paths


def _expressions(tree: c_ast.FileAST) -> list[str]:
    """What both programs print: every complete type's size and layout, every enumerator, every macro."""
    found = []
    for node in tree.ext:
        if not isinstance(node, c_ast.Typedef) or not isinstance(node.type, c_ast.TypeDecl):
            continue
        kind, name = node.type.type, node.name
        if name.startswith("Vdp"):
            continue
        if isinstance(kind, c_ast.Enum):
            found += [e.name for e in kind.values.enumerators if not e.name.endswith("_MAX_ENUM")]
            found.append(f"sizeof({name})")
        elif isinstance(kind, c_ast.Struct) and kind.decls:
            found.append(f"sizeof({name})")
            found += [f"offsetof({name}, {path})" for path in _members(kind)]
            found += [f"sizeof((({name} *)0)->{path})" for path in _members(kind)]
        elif isinstance(kind, c_ast.IdentifierType) and not name.startswith(("uint", "size_t")):
            found.append(f"sizeof({name})")
    return found + re.findall(r"^#define (\w+) \w+$", (SHIM / "gpu_abi.h").read_text(), re.MULTILINE)


def _printed(tmp_path: Path, include: str, expressions: list[str], *arguments: str) -> dict[str, str]:
    lines = [f'printf("%s %lld\\n", "{text}", (long long)({text}));' for text in expressions]
    source = f"{include}\n#include <stdio.h>\nint main(void) {{ {' '.join(lines)} return 0; }}"
    done = _compile(source, tmp_path, "-o", "probe", *arguments)
    assert done.stderr == ""
    run = subprocess.run([tmp_path / "probe"], capture_output=True, text=True, check=True)
    return dict(line.rsplit(" ", 1) for line in run.stdout.splitlines())


def test_layouts_and_values_equal_the_vendors(tmp_path: Path, vendor_include: list[str]) -> None:
    """Sizes, offsets, enumerators and constants of gpu_abi.h are those of cuda.h and nvml.h."""
    expressions = _expressions(_parse(tmp_path))
    assert len(expressions) > 200
    ours = _printed(tmp_path, f'#include "{SHIM / "gpu_abi.h"}"', expressions)
    vendors = _printed(tmp_path, VENDOR, expressions, *vendor_include)
    assert ours == vendors
