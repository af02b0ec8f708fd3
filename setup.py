"""The only build: libvgpu.so, the simulated GPU and the cffi extension (what and how: native/cffi_build.py)."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT / "native"))

import cffi_build  # noqa: E402


class BuildNative(build_ext):
    """Builds what zig builds beside the extension, in place for an editable install."""

    def run(self) -> None:
        package = ROOT / "isolator" if self.inplace else Path(self.build_lib) / "isolator"
        with cffi_build.build_lock():
            errors = cffi_build.build(package)
            super().run()
        if errors:
            sys.exit("\n".join(errors))


setup(
    version=cffi_build.version(),
    ext_modules=[cffi_build.ffibuilder().distutils_extension(str(Path("build") / "cffi"), verbose=False)],
    cmdclass={"build_ext": BuildNative},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
