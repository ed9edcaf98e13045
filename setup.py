"""Maps the package `omagd` to the folder `src`; everything else stands in pyproject.toml."""

from setuptools import find_namespace_packages, setup

HIDDEN = ["*__pycache__*"]
packages = ["omagd", *(f"omagd.{name}" for name in find_namespace_packages("src", exclude=HIDDEN))]

setup(package_dir={"omagd": "src"}, packages=packages, package_data={"omagd": ["config/*.yaml", "config/*/*.yaml"]})
