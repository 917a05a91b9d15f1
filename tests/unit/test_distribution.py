"""What is installed under generic names is ours, and the pure modules stay pure."""

from __future__ import annotations

import subprocess
import sys
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
