"""The files in examples/ are ones that their readers accept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config import load_config
from baton_cluster.specs import worker_specs

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    ("name", "workers"),
    [
        ("split-1+1.yaml", ["prefill-0", "decode-0"]),
        ("split-2+1.yaml", ["prefill-0", "prefill-1", "decode-0"]),
        ("colocated-2.yaml", ["both-0", "both-1"]),
    ],
)
def test_configurations_are_batons(name: str, workers: list[str]) -> None:
    assert [spec.worker_id for spec in worker_specs(load_config(EXAMPLES / name))] == workers


def test_the_ray_launcher_file_fits_rays_own_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    import ray.autoscaler

    schema: Any = json.loads((Path(ray.autoscaler.__file__).parent / "ray-schema.json").read_text(encoding="utf-8"))
    example: Any = yaml.safe_load((EXAMPLES / "ray-gpu-machines.yaml").read_text(encoding="utf-8"))
    jsonschema.validate(example, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**example, "max_worker": 2}, schema)


def test_the_kuberay_manifest_is_a_ray_cluster_with_gpus() -> None:
    manifest: Any = yaml.safe_load((EXAMPLES / "kuberay.yaml").read_text(encoding="utf-8"))
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayCluster")
    (group,) = manifest["spec"]["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_every_example_is_listed() -> None:
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert all(f"`{file.name}`" in text for file in EXAMPLES.glob("*.yaml"))
