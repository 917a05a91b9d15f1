"""cluster.yaml: what it accepts, and how it says no."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from baton.config import ClusterConfig, dump_config, load_config, parse_config
from baton.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_an_empty_file_is_a_valid_configuration(tmp_path: Path) -> None:
    empty = tmp_path / "cluster.yaml"
    empty.write_text("")
    assert load_config(empty) == load_config(None) == ClusterConfig()


def test_the_shipped_cluster_file_is_valid() -> None:
    config = load_config(ROOT / "cluster.yaml")
    assert {name: config.role_of(name) for name in config.pools} == {"prefill": "prefill", "decode": "decode"}


def test_a_dumped_configuration_reads_back_the_same() -> None:
    config = parse_config({"pools": {"big": {"role": "both", "resources": {"fast": 1.0}}}})
    assert parse_config(dump_config(config)) == config


@pytest.mark.parametrize(
    ("tree", "path", "words"),
    [
        ({"engine": {"blok_size": 3}}, "engine.blok_size", ["did you mean `block_size`", "3", "max_batch_tokens"]),
        ({"nme": "x"}, "nme", ["unknown key", "name"]),
        ({"engine": {"block_size": 0}}, "engine.block_size", ["got 0", "int >= 1"]),
        ({"engine": {"block_size": "big"}}, "engine.block_size", ["'big'", "int"]),
        ({"engine": {"policy": "fifo"}}, "engine.policy", ["'fifo'", "prefill_first", "mixed"]),
        ({"launcher": "k8s"}, "launcher", ["'k8s'", "ray", "local"]),
        ({"router": {"port": 70000}}, "router.port", ["70000", "65535"]),
        ({"pools": {"prefill": {"gpu": 1}}}, "pools.prefill.gpu", ["did you mean `gpus`"]),
        ({"pools": {"prefill": {"gpus": -1}}}, "pools.prefill.gpus", ["-1", ">= 0"]),
        ({"pools": {"fast": {}}}, "pools.fast.role", ["prefill, decode, both"]),
        ({"pools": {"prefill": {}}}, "pools", ["0 decode", "both"]),
        ({"pools": 3}, "pools", ["3"]),
        ({"pools": {"prefill": {"role": "router"}}}, "pools.prefill.role", ["'router'", "decode"]),
        ({"liveness": {"timeout_s": 0.6}}, "liveness.timeout_s", ["0.6", "heartbeat_s"]),
        ({"transfer": {"transport": "inproc"}}, "transfer.transport", ["inproc", "zmq+tcp"]),
        ({"transfer": {"transport": "pigeon"}}, "transfer.transport", ["'pigeon'", "auto, inproc, shm", "faulty+"]),
        ({"transfer": {"transport": "zmq+tcp?drop=1"}}, "transfer.transport", ["impossible", "faulty+zmq+tcp"]),
        ({"transfer": {"transport": "faulty+inproc?drop=1"}}, "transfer.transport", ["inproc", "zmq+tcp"]),
        ({"name": "a b"}, "name", ["'a b'"]),
    ],
)
def test_a_mistake_is_named_with_path_value_and_what_is_allowed(
    tree: dict[str, Any], path: str, words: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(tree)
    assert caught.value.path == path
    for word in words:
        assert word in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        load_config(tmp_path / "nowhere.yaml")
    broken = tmp_path / "broken.yaml"
    broken.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        load_config(broken)
    broken.write_text("- a list")
    with pytest.raises(ConfigError, match="mapping"):
        load_config(broken)


@pytest.mark.parametrize(
    "text", ["a: [1", "? [1,2]\n: 3\n", "!!python/object:os.system {}", "name: 2024-13-45", "a: \0", "[" * 1000]
)
def test_what_is_not_yaml_is_one_line_that_names_the_file(tmp_path: Path, text: str) -> None:
    broken = tmp_path / "broken.yaml"
    broken.write_text(text)
    with pytest.raises(ConfigError, match=r"broken\.yaml: is not valid YAML") as caught:
        load_config(broken)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["liveness.timeout_s", "transfer.lease_s", "start_timeout_s"])
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, -1.0, 1e9])
def test_a_time_that_no_timer_can_wait(key: str, value: float) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {key: value})
    assert caught.value.path == key


def test_overrides_reach_into_sections_that_are_absent() -> None:
    config = load_config(None, {"engine.block_size": 32, "pools.decode.workers": 2, "pools.prefill.workers": 1})
    assert (config.engine.block_size, config.pools["decode"].workers) == (32, 2)
    with pytest.raises(ConfigError, match="not a section"):
        load_config(None, {"name": "x", "name.y": 1})


def test_a_config_error_survives_pickling() -> None:
    error = ConfigError("a.b", "is wrong", value=3, allowed="1 or 2")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.path, copy.value, copy.allowed) == (str(error), "a.b", 3, "1 or 2")


def test_overrides_change_the_default_pools_and_do_not_replace_them() -> None:
    config = load_config(None, {"pools.decode.workers": 2})
    assert {name: pool.workers for name, pool in config.pools.items()} == {"prefill": 1, "decode": 2}


def test_a_pools_own_block_size() -> None:
    config = parse_config({"pools": {"prefill": {}, "decode": {"block_size": 32}}, "engine": {"block_size": 8}})
    assert [config.block_size_of(pool) for pool in config.pools.values()] == [8, 32]
    assert config.mixes_block_sizes
    assert not parse_config({"pools": {"both": {"block_size": 32}}}).mixes_block_sizes


@pytest.mark.parametrize("transport", ["shm", "gloo", "nccl", "nixl", "cuda-ipc"])
def test_transports_that_move_blocks_as_they_are_need_one_block_size(transport: str) -> None:
    device = {"device": "cuda" if transport in ("nccl", "cuda-ipc") else "auto"}
    pools = {"prefill": device, "decode": {"block_size": 32, **device}}
    with pytest.raises(
        ConfigError, match=rf"pools\.decode\.block_size.*prefill: 16, decode: 32.*{transport}.*zmq\+tcp"
    ):
        parse_config({"pools": pools, "transfer": {"transport": transport}})
    parse_config({"pools": {**pools, "prefill": pools["decode"]}, "transfer": {"transport": transport}})


@pytest.mark.parametrize("transport", ["inproc", "shm", "gloo", "nccl", "nixl", "cuda-ipc"])
def test_an_encoding_needs_a_transport_that_can_send_it(transport: str) -> None:
    device = {"device": "cuda" if transport in ("nccl", "cuda-ipc") else "auto"}
    tree: dict[str, Any] = {"launcher": "local", "transfer": {"transport": transport, "wire_encoding": "int8"}}
    tree["pools"] = {"prefill": device, "decode": device}
    with pytest.raises(ConfigError, match=rf"transfer\.wire_encoding.*{transport}.*allowed: none, or .*zmq\+tcp"):
        parse_config(tree)
    tree["transfer"]["transport"] = "zmq+tcp"
    assert parse_config(tree).transfer.wire_encoding == "int8"


@pytest.mark.parametrize("other", ["kv_memory_mib", "kv_blocks"])
def test_two_sizes_of_a_pool_are_one_too_many(other: str) -> None:
    with pytest.raises(ConfigError, match=rf"pools\.both\.memory_mib.*cannot be combined with {other}"):
        parse_config({"pools": {"both": {"memory_mib": 1000, other: 100}}})


PLANNED: dict[str, Any] = {
    "pools": {"prefill": {"workers": 2}, "decode": {"workers": 2}},
    "planner": {"enabled": True},
}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"planner": {"low": 0.9}}, r"planner\.low.*must be below planner\.high, 0\.85"),
        ({"planner": {"high": 0.0}}, r"planner\.high"),
        ({"planner": {"max_changes_per_minute": 0}}, r"planner\.max_changes_per_minute.*int >= 1"),
        ({"planner": {"min_prefill": 0}}, r"planner\.min_prefill.*int >= 1"),
        ({"planner": {"min_decode": 3}}, r"planner\.min_decode.*more than the workers of that pool, 2"),
        ({"planner": {"cooldown": 5.0}}, r"planner\.cooldown.*did you mean `cooldown_s`"),
        ({"pools": {"both": {"workers": 2}}}, r"planner\.enabled.*one pool of each role.*both: both"),
        ({"pools": {"more": {"role": "decode"}}}, r"planner\.enabled.*one pool of each role.*decode: decode, more"),
        (
            {"pools": {"decode": {"workers": 2, "cores": 2}}},
            r"planner\.enabled.*same resources: pools\.prefill\.cores is 1, pools\.decode\.cores is 2",
        ),
        ({"pools": {"prefill": {"workers": 2, "gpus": 1}}}, r"pools\.prefill\.gpus is 1.*, pools\.decode\.gpus is 0"),
    ],
)
def test_what_a_planner_cannot_work_with(changes: dict[str, Any], message: str) -> None:
    tree = {key: {**PLANNED[key], **changes.get(key, {})} for key in PLANNED}
    with pytest.raises(ConfigError, match=message):
        parse_config(tree)


def test_without_a_planner_pools_are_as_they_like() -> None:
    assert parse_config(PLANNED).planner.enabled
    pools = {"prefill": {"cores": 2}, "decode": {}, "both": {}}
    assert not parse_config({"pools": pools, "planner": {"low": 2.0}}).planner.enabled
