"""The secret: where it comes from, where it must not show, and what is said where there is none."""

from __future__ import annotations

import json
import pickle
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from baton.config import (
    ApiKey,
    ClusterConfig,
    HttpConfig,
    Secret,
    SecurityConfig,
    dump_config,
    is_loopback,
    load_config,
    parse_config,
)
from baton.errors import ConfigError
from baton.security import Security, exposure, http_exposure
from baton_cli.main import app
from baton_cluster import record
from baton_cluster.cluster import exposures
from baton_cluster.local import LocalCluster
from baton_cluster.ray_cluster import RayCluster
from baton_cluster.record import ClusterRecord
from kv_transfer.registry import open_transport
from router.http.tls import check_tls
from tests.certificates import Certificate

TEXT = "correct horse battery"
SECURED = ClusterConfig(security=SecurityConfig(secret=Secret(TEXT)))


@pytest.fixture(autouse=True)
def no_secret_around(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("BATON_SECRET", raising=False)
    monkeypatch.delenv("BATON_API_KEY", raising=False)


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


# --- HTTP's keys --------------------------------------------------------------------------------------

KEY = "sk-0123456789abcdef"
KEYED = parse_config({"http": {"api_keys": [KEY]}})


def test_api_keys_come_from_the_file_or_else_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "cluster.yaml"
    assert load_config().http.api_keys == ()
    monkeypatch.setenv("BATON_API_KEY", KEY)
    assert load_config().http.api_keys == (ApiKey(KEY),)
    path.write_text(f"http: {{api_keys: [{KEY}1, {KEY}2]}}")
    assert load_config(path).http.api_keys == (ApiKey(f"{KEY}1"), ApiKey(f"{KEY}2"))
    assert parse_config({}).http.api_keys == (), "who parses a finished configuration gets what it says"
    monkeypatch.setenv("BATON_API_KEY", "")
    assert load_config().http.api_keys == ()
    monkeypatch.setenv("BATON_API_KEY", "short")
    with pytest.raises(ConfigError, match=r"^http.api_keys: is too short: 5 characters"):
        load_config()


@pytest.mark.parametrize(
    ("http", "words"),
    [
        ({"api_keys": ["hunter2"]}, "http.api_keys: is too short: 7 characters"),
        ({"api_keys": [KEY, 12345678901234567]}, "http.api_keys: must be a text; put it in quotes"),
        ({"api_keys": "hunter2hunter2hunter2"}, "http.api_keys: has an impossible value; allowed: array"),
        ({"api_keys": {"hunter2": "hunter2"}}, "http.api_keys: has an impossible value; allowed: array"),
        ({"api_keys": ["hunter2 hunter2 hunter2"]}, "http.api_keys: has characters that no header carries"),
        ({"api_keys": ["hünter2hunter2hunter2"]}, "http.api_keys: has characters that no header carries"),
        ({"api_key": "hunter2hunter2"}, "http.api_key: unknown key, did you mean `api_keys`?"),
        ("hunter2hunter2hunter2", "http: must be a mapping"),
        (["hunter2hunter2hunter2"], "http: must be a mapping"),
        ({"apikeys": ["hunter2hunter2"], "port": "x"}, "http.apikeys: unknown key"),
    ],
)
def test_wrong_api_keys_are_refused_without_being_shown(http: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("?", r"\?")) as caught:
        parse_config({"http": http})
    assert not any(text in str(caught.value) for text in ("unter2", KEY, "12345"))


def test_keys_in_a_misspelt_section_are_not_shown() -> None:
    for tree in ({"htttp": {"api_keys": [KEY]}}, {"securty": {"secret": KEY}}, {"api_keys": [KEY]}, {"secret": KEY}):
        with pytest.raises(ConfigError, match="unknown key") as caught:
            parse_config(tree)
        assert KEY not in str(caught.value)
    with pytest.raises(ConfigError, match="not a section") as caught:
        load_config(None, {"http": KEY, "http.port": "1"})
    assert KEY not in str(caught.value)


def test_a_file_that_is_no_mapping_is_not_shown(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"- {KEY}")
    with pytest.raises(ConfigError, match="must hold a mapping of sections, not list") as caught:
        load_config(path)
    assert KEY not in str(caught.value)


def test_api_keys_show_nowhere_but_in_what_runs_the_cluster() -> None:
    shown = (repr(KEYED), str(KEYED.http.api_keys), yaml.safe_dump(dump_config(KEYED)), json.dumps(dump_config(KEYED)))
    assert not any(KEY in text for text in shown)
    assert parse_config(dump_config(KEYED, with_secret=True)) == KEYED
    assert pickle.loads(pickle.dumps(KEYED)) == KEYED
    with pytest.raises(ConfigError, match=r"http.api_keys: is too short"):
        parse_config(dump_config(KEYED))


def test_show_config_shows_no_key(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(f"security: {{secret: {TEXT}}}\nhttp: {{api_keys: [{KEY}]}}")
    result = CliRunner().invoke(app, ["up", str(path), "--show-config"])
    assert result.exit_code == 0, result.output
    assert "api_keys:\n  - <not shown>" in result.output
    assert "secret: <not shown>" in result.output


def test_http_without_keys_deserves_a_warning_where_others_reach_it() -> None:
    assert http_exposure("127.0.0.1", ()) is None
    assert http_exposure("0.0.0.0", (ApiKey(KEY),)) is None
    warning = http_exposure("0.0.0.0", ())
    assert warning is not None and "serving HTTP on 0.0.0.0 without http.api_keys" in warning


def test_a_cluster_warns_of_all_that_is_open() -> None:
    tree: dict[str, Any] = {"router": {"host": "10.0.0.1"}, "http": {"host": "10.0.0.2"}}
    found = exposures(parse_config(tree), ["10.0.0.1"])
    assert len(found) == 2 and "10.0.0.1 without security.secret" in found[0] and "HTTP on 10.0.0.2" in found[1]
    tree["http"]["enabled"] = False
    assert len(exposures(parse_config(tree), ["10.0.0.1"])) == 1
    assert exposures(KEYED, ["127.0.0.1"]) == []


def test_a_secret_is_not_undone_by_http_without_keys() -> None:
    tree: dict[str, Any] = {"security": {"secret": TEXT}, "http": {"host": "0.0.0.0"}}
    with pytest.raises(ConfigError, match=r"http.api_keys: is empty.*BATON_API_KEY"):
        parse_config(tree)
    parse_config({**tree, "http": {"host": "0.0.0.0", "api_keys": [KEY]}})
    parse_config({**tree, "http": {"host": "0.0.0.0", "enabled": False}})
    parse_config({"security": {"secret": TEXT}})


def test_both_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_SECRET", TEXT)
    monkeypatch.setenv("BATON_API_KEY", KEY)
    config = load_config(None, {"http.host": "0.0.0.0"})
    assert config.http.api_keys == (ApiKey(KEY),)
    monkeypatch.delenv("BATON_API_KEY")
    with pytest.raises(ConfigError, match=r"http.api_keys"):
        load_config(None, {"http.host": "0.0.0.0"})


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a.b/c", "https://a b", ""])
def test_origins_are_as_browsers_send_them(origin: str) -> None:
    with pytest.raises(ConfigError, match=r"http.cors_origins"):
        parse_config({"http": {"cors_origins": [origin]}})
    parse_config({"http": {"cors_origins": ["*", "https://example.org", "http://localhost:3000", "null"]}})


# --- HTTPS --------------------------------------------------------------------------------------------


def tls(**files: str | None) -> HttpConfig:
    return parse_config({"http": {f"tls_{name}": file for name, file in files.items()}}).http


def test_a_certificate_that_can_be_used_is_silent(certificate: Certificate, tmp_path: Path) -> None:
    check_tls(parse_config({}).http)
    check_tls(tls(certificate=certificate.chain, key=certificate.key))
    both = tmp_path / "both.pem"
    both.write_bytes(Path(certificate.chain).read_bytes() + Path(certificate.key).read_bytes())
    check_tls(tls(certificate=str(both)))


def test_an_unusable_certificate_is_named(certificate: Certificate, tmp_path: Path) -> None:
    junk, broken = tmp_path / "junk.pem", tmp_path / "broken.pem"
    junk.write_text("not a certificate")
    broken.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    missing, folder = str(tmp_path / "missing.pem"), str(tmp_path)
    for files, words in (
        ({"certificate": missing}, "http.tls_certificate: cannot be read: No such file"),
        ({"certificate": folder}, "http.tls_certificate: cannot be read: Is a directory"),
        ({"certificate": str(junk)}, "http.tls_certificate: holds no certificate in PEM"),
        ({"certificate": certificate.chain}, "http.tls_certificate: holds no private key.*name its file in http.tls_k"),
        ({"certificate": certificate.chain, "key": missing}, "http.tls_key: cannot be read"),
        ({"certificate": certificate.chain, "key": str(junk)}, "http.tls_key: holds no private key"),
        ({"certificate": certificate.chain, "key": certificate.other_key}, "http.tls_key: is not the key of"),
        (
            {"certificate": certificate.chain, "key": certificate.locked_key},
            "http.tls_key: is a key that needs a passw",
        ),
        ({"certificate": str(broken), "key": certificate.key}, "http.tls_certificate: and its key cannot be used"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            check_tls(tls(**files))
        assert caught.value.value == files[caught.value.path.removeprefix("http.tls_")], "the file is named"


def test_a_key_without_a_certificate_has_no_effect() -> None:
    with pytest.raises(ConfigError, match=r"http.tls_key: has no effect without http.tls_certificate"):
        tls(key="key.pem")


def test_a_cluster_does_not_start_with_an_unusable_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def too_late(*_: object, **__: object) -> None:
        raise AssertionError("the model was looked for before the certificate")

    monkeypatch.setattr("baton_cluster.local.resolve_model", too_late)
    monkeypatch.setattr("baton_cluster.ray_cluster.resolve_model", too_late)
    for launcher, start in (("local", LocalCluster), ("ray", RayCluster)):
        tree = {"launcher": launcher, "http": {"tls_certificate": str(tmp_path / "missing.pem")}}
        with pytest.raises(ConfigError, match=r"http.tls_certificate"):
            start(parse_config(tree))
