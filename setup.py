"""The only build: libvgpu.so, the simulated GPU and the cffi extension (see native/cffi_build.py)."""

import contextlib
import io
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "native"))

import cffi_build


class BuildNative(build_ext):
    """Builds what zig builds beside the extension, in place for an editable install."""

    def run(self) -> None:
        package = ROOT / "isolator" if self.inplace else Path(self.build_lib) / "isolator"
        with cffi_build.build_lock():
            errors = cffi_build.build(package)
            super().run()
        if errors:
            sys.exit("\n".join(errors))


# cffi reports on standard output, which belongs to the build front end.
with contextlib.redirect_stdout(io.StringIO()):
    extension = cffi_build.ffibuilder().distutils_extension("build/cffi", verbose=False)

setup(
    version=cffi_build.version(),
    ext_modules=[extension],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
