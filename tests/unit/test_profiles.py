"""Profiles that others published: each format read into a latency model, links, and files that are wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from baton.errors import ConfigError
from baton_cluster.latency import LinkModel
from baton_experiments.anatomy.devices import device
from baton_experiments.profiles.choice import parse_reference
from baton_experiments.profiles.fitted import FittedLatency, profile_tree
from baton_experiments.profiles.links import read_link
from baton_experiments.profiles.llmservingsim import AttentionGrid, LayeredLatency
from baton_experiments.profiles.load import CONVENTIONS, list_profiles, load_profile
from baton_experiments.profiles.memory import kv_tokens_that_fit, memory_gib
from baton_experiments.profiles.profile import EngineProfile
from baton_experiments.profiles.shapes import DECODERS
from baton_experiments.profiles.tables import Curve, Plane, rising
from tests.fakes import plan_of

PUBLISHED = Path(__file__).resolve().parents[3] / "shared" / "workloads" / "profiles"
LLAMA = "meta-llama/Llama-3.1-8B"


def published(name: str = "") -> Path:
    path = PUBLISHED / name
    if not path.exists():
        pytest.skip(f"the published profile {name or 'folder'} is not on this machine")
    return path


def table(path: Path, header: str, *rows: tuple[object, ...]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([header, *(",".join(map(str, row)) for row in rows)]) + "\n")
    return path


# Tables.


def test_a_curve_is_linear_between_points_flat_before_and_goes_on_beyond() -> None:
    curve = Curve.of([(10, 1.0), (20, 3.0), (40, 4.0), (20, 3.2), (20, 9.0)])
    assert curve == Curve((10, 20, 40), (1.0, 3.2, 4.0))  # of three values at one place the median
    assert [curve(x) for x in (1, 10, 15, 30, 60)] == pytest.approx([1.0, 1.0, 2.1, 3.6, 4.8])
    assert Curve((1, 2), (5.0, 4.0))(9) == 4.0  # it does not fall beyond its end
    assert Curve((7,), (2.0,))(100) == 2.0
    assert curve.plus(Curve((0, 30), (1.0, 1.0)), 2.0)(30) == pytest.approx(5.6)


def test_a_plane_is_linear_both_ways_and_leaves_out_rows_that_begin_later() -> None:
    points = [(row, column, 10.0 * row + column) for row in (1, 2, 8) for column in (0, 4, 100)]
    refined = [(4, column, 999.0) for column in (4, 100)]  # begins at 4: what it is at 0 nobody measured
    plane = Plane.of([*points, *refined])
    assert plane.rows == (1, 2, 8)
    assert [plane(1.5, 2), plane(5, 50), plane(16, 200), plane(0, 0)] == pytest.approx([17.0, 100.0, 360.0, 10.0])


def test_points_that_fall_are_left_out_and_named() -> None:
    curve, dropped = rising([(1, 1.0), (2, 2.0), (4, 0.5), (8, 3.0)])
    assert (curve.xs, dropped) == ((1, 2, 8), [4])


def test_what_a_gpu_holds_beside_the_weights() -> None:
    llama = DECODERS[LLAMA]
    assert llama.kv_bytes_per_token == 131_072
    assert kv_tokens_that_fit(llama, 80, llama.kv_bytes_per_token) == (72 * 2**30 - 16_060_000_000) // 131_072
    assert (memory_gib("h100-80gb"), memory_gib("NVIDIA A100 40GB"), memory_gib("RTXPRO6000")) == (80, 40, 96)
    assert (memory_gib("A100-80G"), memory_gib("A100 MIG 1g.10gb")) == (80, 10)
    with pytest.raises(ConfigError, match="gpu_memory_gib"):
        memory_gib("abacus")
    with pytest.raises(ConfigError, match="more GPUs"):
        kv_tokens_that_fit(DECODERS["facebook/opt-66b"], 80, 1)


# DistServe.

LINES = {
    "decoding_large_small_bs_threshold": 3,
    "prefill": [10.0, 0.5, 0.25],
    "decoding_smallbs": [20.0, 0.125, 1.0],
    "decoding_largebs": [8.0, 0.125, 4.0],
}


def distserve(folder: Path, tree: Any = None, name: str = "profiler-a100-80g.vllm.json") -> Path:
    table(folder / "max_num_tokens.csv", "model,tp,pp,max_num_tokens", ("facebook/opt-13b", 1, 1, 66144))
    path = folder / name
    path.write_text(json.dumps({"facebook/opt-13b": {"1": LINES, "2": LINES}} if tree is None else tree))
    return path


def test_distserves_lines(tmp_path: Path) -> None:
    profile = load_profile(distserve(tmp_path))
    assert (profile.model, profile.hardware, profile.gpus) == ("facebook/opt-13b", "A100-80G", 1)
    assert (profile.kv_tokens, profile.kv_bytes_per_token) == (66144, 819_200)
    step_ms = lambda *sizes: 1e3 * profile.latency.step_s(plan_of(*sizes))
    assert step_ms((0, 4), (0, 6)) == pytest.approx(10 + 0.5 * 10 + 0.25 * (16 + 36))
    assert step_ms((6, 4)) == pytest.approx(10 + 0.5 * 4 + 0.25 * (100 - 36))  # what was left of a prompt of 10
    assert step_ms((9, 1), (19, 1)) == pytest.approx(20 + 0.125 * 30 + 1.0 * 2)
    assert step_ms((9, 1), (19, 1), (0, 1)) == pytest.approx(8 + 0.125 * 31 + 4.0 * 3)
    # Both: the fixed part once.
    assert step_ms((0, 4), (9, 1)) == pytest.approx(20 + 0.5 * 4 + 0.25 * 16 + 0.125 * 10 + 1.0)
    # The table does not say: what is left of two GPUs of 80 GiB.
    both = load_profile(tmp_path / "profiler-a100-80g.vllm.json", tp=2)
    assert both.kv_tokens == (int(0.9 * 160 * 2**30) - 25_700_000_000) // 819_200
    assert any("0.9 of 80 GiB" in note for note in both.notes)


def test_kv_that_a_profile_does_not_tell_follows_from_model_and_memory(tmp_path: Path) -> None:
    tree = {model: {"1": LINES} for model in ("facebook/opt-13b", "facebook/opt-66b")}
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(tree))
    unknown = load_profile(path, model="opt-13b")
    assert (unknown.hardware, unknown.kv_tokens) == ("unknown", None)
    assert (
        load_profile(path, model="opt-13b", gpu_memory_gib=80).kv_tokens
        == (int(0.9 * 80 * 2**30) - 25_700_000_000) // 819_200
    )
    too_large = load_profile(path, model="opt-66b", gpu_memory_gib=80)
    assert too_large.kv_tokens is None
    assert any("weights do not fit" in note for note in too_large.notes)
    with pytest.raises(ConfigError, match="gpu_memory_gib: must be positive"):
        load_profile(path, model="opt-13b", gpu_memory_gib=0)


def test_how_a_user_names_a_profile(tmp_path: Path) -> None:
    assert parse_reference("a.json") == ("a.json", {})
    assert parse_reference("a.json,model=facebook/opt-13b,tp=2,gpu_memory_gib=80") == (
        "a.json",
        {"model": "facebook/opt-13b", "tp": 2, "gpu_memory_gib": 80.0},
    )
    comma = tmp_path / "a,tp=b.json"
    comma.write_text("{}")
    assert parse_reference(str(comma)) == (str(comma), {})
    for text, problem in (("a.json,tps=1", "allowed: keys model"), ("a.json,tp", "PATH,KEY"), ("a,tp=x", "no number")):
        with pytest.raises(ConfigError, match=problem):
            parse_reference(text)


def test_conventions_of_distserves_simulator(tmp_path: Path) -> None:
    profile = load_profile(distserve(tmp_path), conventions="distserve")
    step_ms = lambda *sizes: 1e3 * profile.latency.step_s(plan_of(*sizes))
    assert step_ms((0, 4)) == pytest.approx(10 + 0.5 * 4 + 0.25 * 16 + 1 + 2 + 1e-4 * 4)
    assert step_ms((9, 1)) == pytest.approx(20 + 0.125 * 10 + 1 + 2 + 1e-4 * 9)
    # 2 times 40,000 tokens of context: a turn holds 30,000 of them, half of one short of the limit.
    turn = 20 + 0.125 * 30_000 + 1.0 * 0.75 + 2 + 1e-4 * (30_000 - 0.75)
    assert step_ms((39_999, 1), (39_999, 1)) == pytest.approx(turn * 80 / 30)
    assert profile.config["engine.policy"] == "prefill_first"
    assert profile.config["engine.max_batch_tokens"] == 66144
    assert profile.extra_output_tokens == 1
    assert profile.link is not None
    assert profile.link.latency_s == 0.0


# splitwise-sim.

SPLITWISE = (
    "model,hardware,prompt_size,batch_size,token_size,peak_power,prompt_time,token_time,e2e_time,tensor_parallel"
)


def splitwise(folder: Path) -> Path:
    def row(prompt: int, batch: int, tokens: int, prompt_ms: float, token_ms: float) -> tuple[object, ...]:
        return ("llama2-70b", "h100-80gb", prompt, batch, tokens, 0, prompt_ms, token_ms, 0, 4)

    return table(
        folder / "perf_model.csv",
        SPLITWISE,
        row(128, 1, 128, 40, 30.0),
        row(512, 1, 128, 60, 30.384),
        row(512, 1, 128, 62, 30.384),
        row(512, 1, 128, 99, 30.384),
        row(1024, 1, 128, 120, 30.896),
        row(2048, 1, 128, 300, 31.92),
        row(512, 2, 128, 100, 32.0),
        row(512, 4, 128, 200, 36.0),
        row(512, 8, 128, 50, 20.0),  # a run that went wrong
    )


def test_splitwises_servers(tmp_path: Path) -> None:
    profile = load_profile(splitwise(tmp_path))
    assert (profile.gpus, profile.kv_bytes_per_token) == (4, 327_680)
    step_ms = lambda *sizes: 1e3 * profile.latency.step_s(plan_of(*sizes))
    assert step_ms((0, 512)) == pytest.approx(62)
    assert step_ms((0, 256)) == pytest.approx(40 + 22 / 3)
    assert step_ms((0, 512), (0, 512)) == pytest.approx(110)
    assert step_ms((99, 1), (99, 1), (99, 1)) == pytest.approx(34.0)  # less context than was measured costs the same
    assert step_ms((9999, 1)) == pytest.approx(30.384 + 1e-3 * (10_000 - 576), rel=1e-3)  # 1 us a token of context
    assert step_ms((512, 512)) == pytest.approx(62)  # never less than a prompt of its length
    assert step_ms((1024, 1024)) > step_ms((0, 1024))
    assert step_ms((0, 511), (99, 1)) == pytest.approx(62 + 0.1, rel=1e-3)
    assert any("512" not in note and "4096" in note and "left out" in note for note in profile.notes)


def test_conventions_of_splitwise_sim(tmp_path: Path) -> None:
    profile = load_profile(splitwise(tmp_path), conventions="splitwise")
    step_ms = lambda *sizes: 1e3 * profile.latency.step_s(plan_of(*sizes))
    assert profile.kv_bytes_per_token == 2_621_440
    assert step_ms((9999, 1)) == pytest.approx(30.0)  # by tokens of the batch, of which it has one
    assert step_ms((0, 511), (99, 1)) == pytest.approx(62 * 1.1)


# LLMServingSim.

DENSE = (
    "embedding",
    "final_layernorm",
    "layernorm",
    "qkv_proj",
    "rotary_emb",
    "o_proj",
    "gate_up_proj",
    "act_fn",
    "down_proj",
)
META = {"model": LLAMA, "hardware": "RTXPRO6000", "vllm_version": "0.19.0"}


def attention_us(chunk: int, before: int, decodes: int, context: int) -> float:
    """Linear in each of the four, as interpolation needs it to be exact."""
    return 5 + 0.01 * chunk * (1 + 0.001 * before) + decodes * (0.5 + 0.01 * context)


def llmservingsim(folder: Path, meta: dict[str, Any] = META) -> Path:
    table(folder / "dense.csv", "layer,tokens,time_us", *((n, t, 1.0 + t) for n in DENSE for t in (1, 64, 2048)))
    heads = [(name, n, 10.0 * n) for name in ("lm_head", "sampler") for n in (1, 256)]
    table(folder / "per_sequence.csv", "layer,sequences,time_us", *heads)
    kv, chunks, decodes = (16, 512, 16384), (16, 64, 2048), (1, 8, 128)
    points = [
        *((0, 0, d, k) for d in decodes for k in kv),
        *((c, b, 0, 0) for c in chunks for b in (0, *kv)),
        *((c, b, d, k) for c in chunks for b in (0, *kv) for d in decodes for k in kv),
        *((32, b, d, k) for b in (0, 512, 16384) for d in decodes for k in (512, 16384)),  # a sweep of its own
    ]
    header = "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"
    table(folder / "attention.csv", header, *((*point, attention_us(*point)) for point in points))
    (folder / "meta.yaml").write_text(json.dumps(meta))
    return folder


def test_llmservingsims_layers(tmp_path: Path) -> None:
    profile = load_profile(llmservingsim(tmp_path / "tp"))
    assert (profile.model, profile.hardware, profile.gpus) == (LLAMA, "RTXPRO6000", 1)
    step_us = lambda *sizes: 1e6 * profile.latency.step_s(plan_of(*sizes))

    def others_us(tokens: int, requests: int) -> float:
        kernels = 2 + 32 * (2 + 6)  # embedding and last norm; of each layer two norms and six others
        return kernels * (1.0 + tokens) + 2 * 10.0 * requests

    assert step_us((99, 1), (299, 1)) == pytest.approx(others_us(2, 2) + 32 * attention_us(0, 0, 2, 200))
    assert step_us((0, 100)) == pytest.approx(others_us(100, 1) + 32 * attention_us(100, 0, 0, 0))
    assert step_us((300, 100)) == pytest.approx(others_us(100, 1) + 32 * attention_us(100, 300, 0, 0))
    mixed = others_us(104, 5) + 32 * attention_us(100, 300, 4, 1000)
    assert step_us((300, 100), *((999, 1),) * 4) == pytest.approx(mixed)
    # Two prompts attend to fewer positions than one of their length: no KV is before them.
    assert step_us((0, 50), (0, 50)) == pytest.approx(others_us(100, 2) + 32 * attention_us(100, 0, 0, 0))
    assert step_us((4999, 1)) > step_us((2999, 1))  # beyond the measured range it goes on


def test_unequal_decodes_cost_a_share_of_the_longest(tmp_path: Path) -> None:
    fit = {"enabled": True, "per_tp": {1: {"alpha_default": 0.25}}}
    equal = load_profile(llmservingsim(tmp_path / "equal")).latency
    skewed = load_profile(llmservingsim(tmp_path / "skewed", META | {"skew_fit": fit})).latency
    plan = plan_of((99, 1), (299, 1))
    more = 32e-6 * 0.25 * (attention_us(0, 0, 2, 300) - attention_us(0, 0, 2, 200))
    assert skewed.step_s(plan) - equal.step_s(plan) == pytest.approx(more)
    assert skewed.step_s(plan_of((99, 1), (99, 1))) == equal.step_s(plan_of((99, 1), (99, 1)))


def test_a_folder_by_tensor_parallel_degree(tmp_path: Path) -> None:
    for degree in (1, 2):
        llmservingsim(tmp_path / f"tp{degree}")
        (tmp_path / f"tp{degree}" / "meta.yaml").rename(tmp_path / "meta.yaml")
    assert [choice.tp for choice in list_profiles(tmp_path)] == [1, 2]
    assert load_profile(tmp_path, tp=2).gpus == 2
    assert load_profile(tmp_path).gpus == 1
    assert load_profile(tmp_path, gpu_memory_gib=24).kv_tokens == int(0.9 * 24 * 2**30 - 16_060_000_000) // 131_072


# AIConfigurator.

OPERATION = "framework,version,device,op_name,kernel_source"
H100 = ("VLLM", "0.19.0", "NVIDIA H100 80GB HBM3")


def aiconfigurator(folder: Path) -> Path:
    gemm = [(*H100, "gemm", "x", "bfloat16", m, n, 4096, 0.1 * m) for n in (4096, 6144) for m in (1, 64, 4096)]
    gemm.append((*H100, "gemm", "x", "fp8", 1, 6144, 4096, 99))
    table(folder / "gemm_perf.txt", f"{OPERATION},gemm_dtype,m,n,k,latency", *gemm)
    header = (
        f"{OPERATION},batch_size,isl,num_heads,num_key_value_heads,head_dim,beam_width,attn_dtype,kv_cache_dtype,step,"
        "window_size,latency"
    )
    heads, kinds = (32, 8, 128, 1), ("bfloat16", "bfloat16")
    context = [
        (*H100, "context_attention", "x", b, isl, *heads, *kinds, 0, 0, 0.01 * b * isl)
        for b in (1, 8)
        for isl in (1, 4096)
    ]
    other = [
        (*H100, "context_attention", "x", 1, 1, *heads, *kinds, 0, 128, 77),
        (*H100, "context_attention", "x", 1, 1, 16, 4, 128, 1, *kinds, 0, 0, 78),
    ]
    table(folder / "context.csv", header, *context, *other)
    decodes = [
        (*H100, "generation_attention", "x", b, 1, *heads, *kinds, step, 0, 0.001 * b * (step + 1))
        for b in (1, 8)
        for step in (1, 1023)
    ]
    table(folder / "generation.csv", header, *decodes)
    nccl = [(*H100, "alltoall", "NCCL", "half", 2, n, 0.01 + n / 1e8) for n in (1000, 10**6, 10**8)]
    table(folder / "nccl.csv", f"{OPERATION},nccl_dtype,num_gpus,message_size,latency", *nccl)
    return folder


def test_aiconfigurators_operations_make_a_model(tmp_path: Path) -> None:
    profile = load_profile(aiconfigurator(tmp_path), model="llama")
    assert (profile.hardware, profile.gpus) == ("H100", 1)
    latency = profile.latency
    # The products that were not measured, by the roofline: the same share of it as that of 6144 x 4096.
    h100 = device("H100")

    def least(m: int, n: int, k: int) -> float:
        return h100.seconds(2 * m * n * k, 2 * (m * k + k * n + m * n))

    def products(m: int) -> float:
        derived = least(m, 28672, 4096) + least(m, 4096, 14336)
        return 1e-3 * (32 * (2 * 0.1 * m) + 32 * 0.1 * m * derived / least(m, 6144, 4096))

    def moved(m: int) -> float:
        numbers = 32 * (2 * 4 * 4096 + 2 * 40 * 128 + 3 * 14336) + 4 * 4096
        return h100.seconds(0, 2 * m * numbers)

    head = 1e-3 * 0.1 * least(1, 128256, 4096) / least(1, 6144, 4096)
    prompt = latency.step_s(plan_of((0, 64)))
    assert prompt == pytest.approx(products(64) + moved(64) + head + 32e-3 * 0.01 * 64)
    decode = latency.step_s(plan_of((499, 1)))
    assert decode == pytest.approx(products(1) + moved(1) + head + 32e-3 * 0.001 * 500)
    assert any("gate and up, down, output matrix" in note for note in profile.notes)
    assert profile.link is not None
    assert profile.link.bytes_per_s == pytest.approx(1e11)


# Links.


def test_links_are_lines_through_the_transfers(tmp_path: Path) -> None:
    header = "size,time_stats.send_recv.median,collective,devices_per_node,num_workers"
    rows = [(n, 0.02 + n / 1e6, "send_recv", 2, 2) for n in (10**3, 10**6, 10**8)]
    rows += [(n, 0.05 + n / 1e5, "send_recv", 1, 2) for n in (10**3, 10**6, 10**8)]
    path = table(tmp_path / "vidur.csv", header, *rows)
    within, between = read_link(path), read_link(path, between_nodes=True)
    assert (within.latency_s, within.bytes_per_s) == pytest.approx((2e-5, 1e9))
    assert (between.latency_s, between.bytes_per_s) == pytest.approx((5e-5, 1e8))
    with pytest.raises(ConfigError, match="between two GPUs, too few"):
        read_link(table(tmp_path / "one.csv", header, rows[0]))
    with pytest.raises(ConfigError, match="do not rise"):
        read_link(table(tmp_path / "falls.csv", header, (10, 2, *rows[0][2:]), (20, 1, *rows[0][2:])))
    with pytest.raises(ConfigError, match="no table of transfer times"):
        read_link(splitwise(tmp_path))


# Choosing.


def test_what_a_folder_holds_and_which_is_meant(tmp_path: Path) -> None:
    distserve(tmp_path)
    distserve(tmp_path, name="profiler-a100-80g.distserve.json")
    splitwise(tmp_path)
    llmservingsim(tmp_path / "gpu")
    (tmp_path / "notes.json").write_text('{"unrelated": 1}')
    (tmp_path / "broken.json").write_text("{")
    found = {(c.format, c.model, c.tp, c.engine) for c in list_profiles(tmp_path)}
    assert found == {
        *(("distserve", "facebook/opt-13b", tp, engine) for tp in (1, 2) for engine in ("vllm", "distserve")),
        ("splitwise", "llama2-70b", 4, "splitwise"),
        ("llmservingsim", LLAMA, 1, "vllm"),
    }
    with pytest.raises(ConfigError, match=r"several profiles.*opt-13b.*engine distserve.*engine vllm"):
        load_profile(tmp_path, model="opt-13b")
    assert load_profile(tmp_path, model="opt-13b", engine="vllm").gpus == 1
    assert load_profile(tmp_path, model="OPT-13B", engine="vllm", tp=2).gpus == 2
    with pytest.raises(ConfigError, match=r"no such profile.*tp 3.*llama2-70b"):
        load_profile(tmp_path, tp=3)
    with pytest.raises(ConfigError, match=r"unknown.*distserve, splitwise"):
        load_profile(tmp_path, model="llama2-70b", conventions="mine")
    with pytest.raises(ConfigError, match="for profiles of distserve"):
        load_profile(tmp_path, model="llama2-70b", conventions="distserve")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no profile of a known format"):
        list_profiles(tmp_path / "empty")
    with pytest.raises(ConfigError, match="no file or folder"):
        list_profiles(tmp_path / "absent")


def test_a_profile_of_baton_profile(tmp_path: Path) -> None:
    profile = EngineProfile(
        name="demo here",
        model="demo",
        hardware="this machine",
        latency=FittedLatency((1, 8), (0.01, 0.02)),
        kv_bytes_per_token=46080,
        kv_tokens=4096,
        gpus=0,
        link=LinkModel(1e-4, 1e9),
    )
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile_tree(profile, {})))
    assert load_profile(path) == profile
    assert load_profile(tmp_path, model="demo") == profile


# What is wrong with a file is said with its place.


@pytest.mark.parametrize(
    ("make", "spoil", "message"),
    [
        (distserve, lambda tree: tree["facebook/opt-13b"]["1"].pop("prefill"), r"facebook/opt-13b\.1.*prefill"),
        (distserve, lambda tree: tree["facebook/opt-13b"]["1"].update(prefill=[1.0, 2.0]), r"opt-13b\.1.*\$\.prefill"),
        (distserve, lambda tree: tree["facebook/opt-13b"]["1"].update(prefill=[0.0, 1.0, 2.0]), "must take time"),
        (distserve, lambda tree: tree["facebook/opt-13b"].update(two=LINES), "tensor parallel degree.*'two'"),
        (distserve, lambda tree: tree.update({"facebook/opt-13b": {"1": LINES}, "odd": 5}), "odd: holds no profiles"),
        (distserve, lambda tree: tree.update({"my/model": {"1": LINES}}), "my/model"),
    ],
)
def test_a_distserve_file_that_is_wrong(
    tmp_path: Path, make: Callable[..., Path], spoil: Callable[[Any], object], message: str
) -> None:
    tree = json.loads(json.dumps({"facebook/opt-13b": {"1": LINES, "2": LINES}}))
    spoil(tree)
    path = make(tmp_path, tree)
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(path, model="my/model" if "my/model" in tree else None)
    assert caught.value.path.startswith(str(path))


@pytest.mark.parametrize(
    ("make", "file", "line", "replaced", "by", "message"),
    [
        (splitwise, "perf_model.csv", 3, "60", "soon", "prompt_time is no time or size.*'soon'"),
        (splitwise, "perf_model.csv", 3, "60", "-60", "prompt_time is no time or size"),
        (splitwise, "perf_model.csv", 3, "60", "nan", "prompt_time is no time or size"),
        (splitwise, "perf_model.csv", 3, "512,1", "512,1.5", "batch_size is no whole number"),
        (splitwise, "perf_model.csv", 4, ",30.384", "", "has 9 fields, the header 10"),
        (llmservingsim, "dense.csv", 2, "embedding,1", "embedding,one", "tokens is no time or size"),
        (llmservingsim, "attention.csv", 9, ",", ",", None),
        (llmservingsim, "per_sequence.csv", 1, "sequences", "sequence", "has no column sequences.*layer"),
    ],
)
def test_a_table_that_is_wrong(
    tmp_path: Path, make: Callable[..., Path], file: str, line: int, replaced: str, by: str, message: str | None
) -> None:
    where = make(tmp_path)
    path = tmp_path / file
    lines = path.read_text().splitlines()
    assert replaced in lines[line - 1]
    lines[line - 1] = lines[line - 1].replace(replaced, by, 1)
    path.write_text("\r\n".join(lines))  # without a last line end, and with those of another system
    if message is None:
        assert load_profile(where).gpus == 1
        return
    with pytest.raises(ConfigError, match=message) as caught:
        load_profile(where)
    assert caught.value.path == f"{path}:{line}"


def test_a_folder_that_lacks_something(tmp_path: Path) -> None:
    path = llmservingsim(tmp_path / "a")
    rows = (path / "dense.csv").read_text().splitlines()
    (path / "dense.csv").write_text("\n".join(row for row in rows if not row.startswith("o_proj")))
    with pytest.raises(ConfigError, match=r"dense\.csv: has no layer o_proj"):
        load_profile(path)
    path = llmservingsim(tmp_path / "b")
    (path / "meta.yaml").unlink()
    with pytest.raises(ConfigError, match=r"meta\.yaml: is missing"):
        load_profile(path)
    path = llmservingsim(tmp_path / "c", {"model": LLAMA})
    with pytest.raises(ConfigError, match="does not say hardware"):
        load_profile(path)
    path = llmservingsim(tmp_path / "d", META | {"model": "some/model"})
    with pytest.raises(ConfigError, match="some/model, whose dimensions are not known"):
        load_profile(path)
    path = llmservingsim(tmp_path / "e")
    rows = (path / "attention.csv").read_text().splitlines()
    (path / "attention.csv").write_text("\n".join(row for row in rows if not row.startswith("0,")))
    with pytest.raises(ConfigError, match="no rows of decodes alone"):
        load_profile(path)
    (path / "attention.csv").write_text(rows[0] + "\n")
    with pytest.raises(ConfigError, match="holds no measurements"):
        load_profile(path)


# The published files themselves.


def test_every_published_profile_loads_and_times_steps_plausibly() -> None:
    folder = published()
    found = list_profiles(folder)
    assert {choice.format for choice in found} == {"distserve", "splitwise", "llmservingsim", "aiconfigurator"}
    for choice in found:
        profile = load_profile(
            choice.path, model=choice.model, hardware=choice.hardware, engine=choice.engine, tp=choice.tp
        )
        latency = pickle.loads(pickle.dumps(profile.latency))  # it is sent to other processes
        decode, prompt = plan_of(*((500, 1),) * 16), plan_of((0, 1024))
        assert 0.005 < latency.step_s(decode) < 0.3, choice
        assert latency.step_s(decode) <= latency.step_s(plan_of((0, 1024), *((500, 1),) * 16)), choice
        assert latency.step_s(prompt) < latency.step_s(plan_of((0, 1024), (0, 1024))), choice
        assert profile.kv_tokens is None or profile.kv_tokens > 10_000, choice
        for name, format in CONVENTIONS.items():
            if format == choice.format:
                own = load_profile(
                    choice.path, model=choice.model, hardware=choice.hardware, tp=choice.tp, conventions=name
                )
                assert 0.005 < own.latency.step_s(decode) < 0.3, choice


def test_published_points_come_back() -> None:
    folder = published()
    opt = load_profile(folder, model="opt-13b", engine="distserve")
    assert opt.kv_tokens == 66144
    assert 1e3 * opt.latency.step_s(plan_of((0, 1000))) == pytest.approx(
        18.10254647486372 + 0.1019122572698738 * 1000 + 7.122264314252114e-06 * 1000**2
    )
    llama = load_profile(folder, model="Llama-3.1-8B", hardware="RTXPRO6000")
    step_us = 1e6 * llama.latency.step_s(plan_of(*((1023, 1),) * 128))
    per_layer = 2 * 3.06717 + 42.976 + 2.85867 + 31.5093 + 180.512 + 3.35967 + 94.4853 + 404.865
    assert step_us == pytest.approx(3.01867 + 3.2 + 734.306 + 63.766 + 32 * per_layer)
    within = read_link(folder / "vidur_h100_dgx_send_recv.csv")
    between = read_link(folder / "vidur_h100_dgx_send_recv.csv", between_nodes=True)
    assert 250e9 < within.bytes_per_s < 450e9  # NVLink
    assert 20e9 < between.bytes_per_s < 50e9  # InfiniBand
    assert 150e9 < read_link(folder / "aiconfigurator_h100_nccl2.27.3.csv").bytes_per_s < 450e9


def test_interpolation_meets_measured_points_that_it_does_not_use() -> None:
    """One of the two sweeps of that file lies between the points of the other, from which the grid is made."""
    folder = published("llmservingsim_RTXPRO6000_llama31-8b")
    latency = load_profile(folder).latency
    assert isinstance(latency, LayeredLatency)
    grid: AttentionGrid = latency.mixed
    errors = []
    for row in (folder / "attention.csv").read_text().splitlines()[1:]:
        chunk, before, decodes, context, us = map(float, row.split(","))
        if chunk and decodes and chunk not in grid.chunk:
            errors.append(abs(grid(chunk, before, decodes, context) / (32e-6 * us) - 1))
    assert len(errors) > 5_000
    assert median(errors) < 0.04
    assert sorted(errors)[int(0.9 * len(errors))] < 0.12
