"""The secret: where it comes from, where it must not show, and what is said where there is none."""

from __future__ import annotations

import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml

from baton.config import ClusterConfig, Secret, SecurityConfig, dump_config, load_config, parse_config
from baton.errors import ConfigError
from baton.security import Security, exposure, is_loopback
from baton_cluster import record
from baton_cluster.local import LocalCluster
from baton_cluster.record import ClusterRecord
from kv_transfer.registry import open_transport

TEXT = "correct horse battery"
SECURED = ClusterConfig(security=SecurityConfig(secret=Secret(TEXT)))


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_SECRET", raising=False)


def test_the_secret_comes_from_the_file_or_else_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cluster.yaml"
    assert load_config().security.secret is None
    monkeypatch.setenv("BATON_SECRET", TEXT)
    assert load_config().security.secret == Secret(TEXT)
    path.write_text("security: {secret: another one than that}")
    assert load_config(path).security.secret == Secret("another one than that")
    monkeypatch.setenv("BATON_SECRET", "")
    assert load_config().security.secret is None
    monkeypatch.setenv("BATON_SECRET", "short")
    with pytest.raises(ConfigError, match="too short: 5 characters"):
        load_config()


@pytest.mark.parametrize(
    "tree",
    [
        {"security": {"secret": "hunter2hunter2"}},
        {"security": {"secret": 22222222222222222}},
        {"security": {"secret": [TEXT]}},
        {"security": {"sekret": TEXT}},
        {"security": TEXT},
        {"security": [TEXT]},
    ],
    ids=range(6),
)
def test_what_is_wrong_with_a_secret_is_said_without_it(tree: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="security") as caught:
        parse_config(tree)
    assert not any(text in str(caught.value) for text in (TEXT, "hunter2", "2222"))


def test_an_override_of_a_wrong_section_does_not_show_it() -> None:
    with pytest.raises(ConfigError, match="not a section") as caught:
        load_config(None, {"security": TEXT, "security.secret": "x"})
    assert TEXT not in str(caught.value)


def test_the_secret_shows_nowhere_but_in_what_runs_the_cluster() -> None:
    shown = (
        repr(SECURED),
        str(SECURED.security.secret),
        yaml.safe_dump(dump_config(SECURED)),
        repr(Security(TEXT)),
        repr(ClusterRecord("n", "a", None, 1, 1.0, Secret(TEXT))),
    )
    assert not any(TEXT in text for text in shown)
    assert parse_config(dump_config(SECURED, with_secret=True)) == SECURED
    assert pickle.loads(pickle.dumps(SECURED)) == SECURED, "it goes to the processes of the cluster"
    with pytest.raises(ConfigError, match="too short"):
        parse_config(dump_config(SECURED))  # a dump must not become a secret that anybody can read up


def test_keys_depend_on_the_secret_and_on_the_side() -> None:
    one, same, other = Security(TEXT), Security(Secret(TEXT)), Security(TEXT + "!")
    assert (one._server, one._client) == (same._server, same._client)
    pairs = [one._server, one._client, other._server, other._client]
    assert len({key for pair in pairs for key in pair}) == 8


def test_the_record_of_a_cluster_is_for_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_RUNTIME", str(tmp_path / "new" / "baton"))
    record.write_record("mine", "tcp://x", None, secret=Secret(TEXT), warnings=["mind the step"])
    try:
        found = record.find_record("mine")
        assert (found.secret, found.warnings) == (Secret(TEXT), ["mind the step"])
        file = tmp_path / "new" / "baton" / "mine.json"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    finally:
        record.remove_record("mine")


def test_a_host_that_others_reach_deserves_a_warning() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.1.2.3", "::1", "[::1]", "localhost")))
    assert not any(map(is_loopback, ("0.0.0.0", "*", "10.0.0.2", "::", "node7")))
    assert exposure(["127.0.0.1", "::1"], None) is None
    warning = exposure(["10.0.0.2", "127.0.0.1", "10.0.0.2"], None)
    assert warning is not None and "listening on 10.0.0.2 without security.secret" in warning
    assert exposure(["10.0.0.2"], Secret(TEXT)) is None


def test_a_local_cluster_warns(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def stop_here(*_: object, **__: object) -> None:
        raise InterruptedError

    monkeypatch.setattr("baton_cluster.local.resolve_model", stop_here)
    cluster = LocalCluster.__new__(LocalCluster)
    with pytest.raises(InterruptedError):
        cluster.__init__(parse_config({"launcher": "local", "router": {"host": "0.0.0.0"}}))  # type: ignore[misc]
    assert len(cluster.warnings) == 1 and "whoever reaches these ports" in cluster.warnings[0]
    assert not caplog.records, "whoever starts the cluster shows its warnings; nobody says them twice"


@pytest.mark.parametrize("scheme", ["gloo", "nccl", "nixl"])
def test_a_secret_is_not_undone_by_a_transport_in_clear(scheme: str) -> None:
    with pytest.raises(ConfigError, match="in clear"):
        open_transport(f"{scheme}://10.0.0.2", Security(TEXT))
    tree = {"transfer": {"transport": scheme}, "ray": {"address": "auto"}, "security": {"secret": TEXT}}
    with pytest.raises(ConfigError, match="in clear"):
        parse_config(tree)
    parse_config({"transfer": {"transport": scheme}, "security": {"secret": TEXT}})  # one machine
