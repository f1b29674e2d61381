"""Builds the C extensions where there is a compiler, and tags the wheel by what was built; see pyproject.toml."""

import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

MEANING = {
    "engine.ops.attention._paged": "attention on a CPU is slower: backend `torch` in place of `native`",
    "engine.core.shm._ring": "messages between the processes of several ranks go through pipes, not shared memory",
}
"""Extension -> what its absence means."""


class BuildExtensions(build_ext):
    """Reports each optional extension that could not be built."""

    def run(self) -> None:
        super().run()
        for extension in self.extensions:
            if not Path(self.get_ext_fullpath(extension.name)).exists():
                print(f"warning: {extension.name} was not built: {MEANING[extension.name]}", file=sys.stderr)


class BuildWheel(bdist_wheel):
    """Tags a wheel without compiled extensions as fit for any platform."""

    def get_tag(self) -> tuple[str, str, str]:
        build = self.get_finalized_command("build_ext")
        if not any(Path(build.get_ext_fullpath(one.name)).exists() for one in self.distribution.ext_modules):
            self.root_is_pure = True
        return super().get_tag()


setup(cmdclass={"build_ext": BuildExtensions, "bdist_wheel": BuildWheel})
