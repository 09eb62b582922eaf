"""Install ``eval/`` and ``backends/``, which are at the top of the repository, as parts of the
package compare_q.
"""

from setuptools import find_packages, setup

FOLDERS = ("eval", "backends")

setup(
    packages=[
        "compare_q",
        *(f"compare_q.{name}" for name in find_packages(include=[f"{top}*" for top in FOLDERS])),
    ],
    package_dir={f"compare_q.{top}": top for top in FOLDERS},
)
