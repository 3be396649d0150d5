"""What pyproject.toml cannot say: a wheel carries ``config/`` inside the package. Everything else is there."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithConfigFiles(build_py):
    """Copies ``config/`` to ``torchrl_grpo/config_files``, where the package looks for it outside of a checkout."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            shutil.copytree(
                "config", Path(self.build_lib, "torchrl_grpo", "config_files"), dirs_exist_ok=True
            )


setup(cmdclass={"build_py": BuildWithConfigFiles})
