"""What is installed under generic names is ours, and the pure modules stay pure."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GENERIC = ("router", "kv_transfer", "prefill_worker", "decode_worker")


@pytest.mark.parametrize("package", GENERIC)
def test_generic_names_belong_to_this_distribution(package: str) -> None:
    module = __import__(package)
    assert Path(module.__path__[0]) == ROOT / package
    assert set(packages_distributions().get(package, [])) <= {"baton-serve"}, "another distribution has it too"


def test_layers_and_purity_hold() -> None:
    ended = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports"))], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode == 0, ended.stdout[-3000:]


def test_a_launcher_does_not_import_torch() -> None:
    """`baton submit` and `baton status` answer at once, and workers load torch only where they compute."""
    code = "import sys, baton_cli.main, router.client, baton_cluster.ray_cluster; assert 'torch' not in sys.modules"
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]


def test_a_source_distribution_can_build_the_kernels(tmp_path: Path) -> None:
    """Its list of files, made as setuptools makes it, has the headers too."""
    pytest.importorskip("setuptools")
    command = [sys.executable, "setup.py", "-q", "egg_info", "--egg-base", str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    (sources,) = tmp_path.glob("*.egg-info/SOURCES.txt")
    files = set(sources.read_text().splitlines())
    kernels = {str(path.relative_to(ROOT)) for path in (ROOT / "baton/engine/native/csrc").iterdir()}
    assert {Path(name).suffix for name in kernels} == {".h", ".cpp"}
    assert {"setup.py", "pyproject.toml"} | kernels <= files


def test_a_wheel_has_all_packages_and_the_library() -> None:
    """What the build would put into it, without building; the library under the name by which it is looked for."""
    pytest.importorskip("setuptools")
    code = """
import json
from setuptools import distutils
import distutils.core

distribution = distutils.core.run_setup("setup.py", ["-q", "build_ext"], stop_after="config")
distribution.parse_config_files()
command = distribution.get_command_obj("build_ext")
command.ensure_finalized()
print(json.dumps({"packages": distribution.packages, "built": command.get_outputs()}))
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr[-2000:]
    told = json.loads(ended.stdout)
    (library,) = told["built"]
    assert library.endswith(f"baton/engine/native/_kernels{sysconfig.get_config_var('EXT_SUFFIX')}")
    tops = {name.partition(".")[0] for name in told["packages"]}
    found = {
        ".".join(path.parent.relative_to(ROOT).parts) for top in tops for path in (ROOT / top).rglob("__init__.py")
    }
    assert found == set(told["packages"])
