"""Build the package `omagd` from the folder `src`, through the link `.package/omagd` that this file makes.

`pip install -e` puts `.package` on the import path, so editors and type checkers find `omagd` as a folder there.
"""

from pathlib import Path

from setuptools import find_namespace_packages, setup

LINK = Path(".package", "omagd")
if not LINK.is_dir():
    LINK.parent.mkdir(exist_ok=True)
    LINK.symlink_to(Path("..", "src"))

packages = find_namespace_packages(".package", include=["omagd*"], exclude=["*__pycache__*"])
setup(
    package_dir={"": ".package"},
    packages=packages,
    package_data={
        "omagd": [
            "py.typed",
            "config/*.yaml",
            "config/*/*.yaml",
            "envs/*/README.md",
            "lab/watch/*.html",
            "lab/analysis/*.html",
        ]
    },
)
