"""The packages, which setup.cfg cannot spell: the pieces in configs/ are shipped as kvpath.configs."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["kvpath", "kvpath.*"]), "kvpath.configs"],
    package_dir={"kvpath.configs": "configs"},
    package_data={"kvpath": ["py.typed", "attention/native/*.[ch]"], "kvpath.configs": ["**/*.yaml"]},
)
