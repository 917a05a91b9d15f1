"""The arithmetic of a request against published numbers, and against counting by hand."""

from __future__ import annotations

import io
import json
import re
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from baton.config import parse_config
from baton.errors import ConfigError, ModelError
from baton.step_log import StepRecord, StepShape
from baton_cli.anatomy import PAPER, chosen_device, chosen_lengths, run_anatomy, tables
from baton_experiments.anatomy import published
from baton_experiments.anatomy.allocators import (
    Buddy,
    FirstFit,
    Usage,
    compare,
    contiguous,
    paged,
    reserved,
    times_to_fill,
)
from baton_experiments.anatomy.arithmetic import (
    Sizes,
    decode,
    decode_batch_at_ridge,
    element_bytes,
    kv_bytes_per_token,
    memory_fit,
    prefill,
    step_work,
    weight_bytes,
    work_with_cache,
    work_without_cache,
)
from baton_experiments.anatomy.devices import DEVICES, device
from baton_experiments.anatomy.measured import measure, useful_share
from baton_experiments.anatomy.models import KNOWN, read_shape, shape_of
from baton_experiments.anatomy.plot import plot_anatomy
from baton_experiments.anatomy.quantization import read_quantization
from baton_experiments.anatomy.report import MAX_REQUESTS, Question, anatomy, growth
from baton_experiments.anatomy.shape import ModelShape

GIB, KIB = 2**30, 2**10
PAPERS = Path(__file__).parents[3] / "shared/workloads/reference/paper_numbers.json"


@pytest.fixture(scope="module")
def llama() -> ModelShape:
    return read_shape("llama-3.1-8b")


# --- published numbers -----------------------------------------------------------------------------


def test_the_kv_cache_of_llama_3_1_8b(llama: ModelShape) -> None:
    assert kv_bytes_per_token(llama) == 131_072
    assert 8192 * kv_bytes_per_token(llama) == GIB
    assert 131_072 * kv_bytes_per_token(llama) == 16 * GIB
    assert llama.kv_per_token_multi_head * 2 == 512 * KIB


@pytest.mark.parametrize("name", [name for name in KNOWN if not name.startswith("opt")])
def test_parameters_are_counted_to_the_last(name: str) -> None:
    assert read_shape(name).parameters == KNOWN[name].parameters


@pytest.mark.parametrize("name", ["opt-13b", "opt-66b", "opt-175b"])
def test_parameters_of_opt_are_what_their_names_say(name: str) -> None:
    assert read_shape(name).parameters == pytest.approx(KNOWN[name].parameters, rel=0.015)


def test_mixtral_passes_a_token_through_two_of_eight_experts() -> None:
    shape = read_shape("mixtral-8x7b")
    assert shape.active == pytest.approx(12.9e9, rel=0.015), "12.9B, Jiang et al., arXiv 2401.04088"
    assert decode(shape, 1, 1).weight_bytes < 0.3 * 2 * shape.parameters
    assert decode(shape, 256, 1).weight_bytes == pytest.approx(2 * shape.parameters, rel=0.02)


@pytest.mark.parametrize(("name", "gib", "slots"), [("opt-13b", 12, 15_700), ("opt-175b", 264, 60_100)])
def test_kv_slots_of_pagedattentions_table_1(name: str, gib: int, slots: int) -> None:
    assert gib * GIB // kv_bytes_per_token(read_shape(name)) == pytest.approx(slots, abs=60)


def test_kv_of_llama_3_70b_as_mooncake_has_it() -> None:
    assert kv_bytes_per_token(read_shape("llama-3.1-70b")) == 320 * KIB


def test_the_published_numbers_are_as_shared() -> None:
    if not PAPERS.exists():
        pytest.skip(f"{PAPERS} is not here")
    papers = json.loads(PAPERS.read_text(encoding="utf-8"))["pagedattention"]
    for name, theirs in (("max", "orca_max"), ("pow2", "orca_pow2"), ("oracle", "orca_oracle"), ("paged", "vllm")):
        for part, share in published.USAGE[name].items():
            assert share == pytest.approx(papers["fig2_pct"][theirs][part] / 100)
        assert published.BATCH[name] == papers["fig13_batched_requests_opt13b"]["sharegpt_2rps"][theirs]
    assert pytest.approx(1000 * papers["table1"]["opt13b"]["slots_K"], abs=60) == published.SLOTS


@pytest.fixture(scope="module")
def paper_usage() -> dict[str, Usage]:
    return compare(published.sharegpt_lengths(3000), slots=published.SLOTS, max_len=published.MAX_LEN)


@pytest.mark.parametrize(("name", "tolerance"), [("max", 0.01), ("pow2", 0.02), ("oracle", 0.02), ("paged", 0.015)])
def test_the_useful_share_of_kv_memory_is_that_of_pagedattentions_figure_2(
    paper_usage: dict[str, Usage], name: str, tolerance: float
) -> None:
    """20.4, 26.8, 38.2 and 96.3 %, and how the rest divides. Only the spread of lengths was taken from there."""
    for part, share in published.USAGE[name].items():
        assert getattr(paper_usage[name], part) == pytest.approx(share, abs=tolerance if part == "token" else 0.04)


def test_batches_are_those_of_pagedattentions_figure_13(paper_usage: dict[str, Usage]) -> None:
    assert paper_usage["max"].batch == 7.0
    for name in ("pow2", "oracle"):
        assert paper_usage[name].batch == pytest.approx(published.BATCH[name], rel=0.1)


def test_what_oracle_loses_is_lost_by_the_buddies(paper_usage: dict[str, Usage]) -> None:
    assert paper_usage["oracle_first_fit"].external < 0.2 < 0.3 < paper_usage["oracle"].external


# --- allocators ------------------------------------------------------------------------------------

SPAN_SIZES = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 10)), min_size=1, max_size=60)


@pytest.mark.parametrize("kind", [Buddy, FirstFit])
@given(slots=st.integers(1, 3000), steps=SPAN_SIZES)
def test_spans_never_overlap_and_all_come_back(
    kind: type[Buddy] | type[FirstFit], slots: int, steps: list[tuple[int, int]]
) -> None:
    pool, taken = kind(slots), []
    for size, victim in steps:
        start = pool.take(size)
        if start is not None:
            assert start >= 0 and start + size <= slots
            assert all(start + size <= s or s + n <= start for s, n in taken)
            taken.append((start, size))
        elif taken:
            pool.free(*taken.pop(victim % len(taken)))
    for start, size in taken:
        pool.free(start, size)
    largest = 1 << (slots.bit_length() - 1) if kind is Buddy else slots
    assert pool.take(largest) is not None, "what was given back is one hole again"


def test_reservations() -> None:
    assert reserved("max", 100, 25, 2048) == 2048
    assert reserved("pow2", 100, 25, 2048) == 132
    assert reserved("pow2", 100, 32, 2048) == 132
    assert reserved("pow2", 100, 1, 2048) == 101
    assert reserved("pow2", 1500, 520, 2048) == 2048
    assert reserved("oracle", 100, 25, 2048) == 125


def test_the_use_of_memory_by_hand() -> None:
    """Two requests of 4 + 4 in 32 slots at most, of which each is given 16: always both run."""
    usage = contiguous([(4, 4)] * 40, slots=32, max_len=16, reserve="max")
    assert usage.batch == 2
    assert usage.token == pytest.approx(2 * (4 + 5 + 6 + 7) / 4 / 32)
    assert usage.reservation == pytest.approx(2 * (4 + 3 + 2 + 1) / 4 / 32)
    assert (usage.internal, usage.external) == (pytest.approx(2 * 8 / 32), pytest.approx(0))


def test_paged_use_by_hand() -> None:
    """Alone in a pool of three blocks of 8: a request of 9 + 10 takes the third one with its 17th token."""
    usage = paged([(9, 10)] * 40, slots=24, max_len=24, block_size=8)
    assert usage.batch == 1 and usage.preemptions == 0
    assert usage.token == pytest.approx(sum(range(9, 19)) / 10 / 24)
    internal = sum(16 - n for n in range(9, 17)) + sum(24 - n for n in (17, 18))
    assert usage.internal == pytest.approx(internal / 10 / 24)


@given(st.integers(0, 10_000))
def test_shares_sum_to_one_and_preempted_requests_end(seed: int) -> None:
    draw = Random(seed)
    lengths = [(draw.randint(1, 60), draw.randint(1, 60)) for _ in range(60)]
    for usage in compare(lengths, slots=256, max_len=128, block_size=8).values():
        assert sum(usage[:4]) == pytest.approx(1)
        assert all(-1e-9 <= share <= 1 for share in usage[:4])


def test_memory_that_is_too_small_is_told() -> None:
    with pytest.raises(ConfigError, match="slots"):
        contiguous([(4, 4)], slots=8, max_len=16, reserve="max")
    with pytest.raises(ConfigError, match="lengths"):
        paged([(40, 4)], slots=8, max_len=16)
    with pytest.raises(ConfigError, match="too few"):
        contiguous([(4, 4)], slots=32, max_len=16, reserve="max")


# --- operations and bytes --------------------------------------------------------------------------


def test_a_decode_step_alone_reads_its_weights_and_its_cache(llama: ModelShape) -> None:
    work = decode(llama, 1, 1024)
    embedding = llama.vocab * llama.hidden
    assert work.weight_bytes == pytest.approx(2 * (llama.parameters - embedding), rel=1e-3)
    assert work.kv_bytes == (1024 + 1) * 131_072, "all that is attended to, and the new one is written"
    attention = 4 * llama.layers * llama.heads * 128 * 1024
    assert work.operations == pytest.approx(2 * (llama.parameters - embedding) + attention, rel=1e-3)
    assert work.intensity == pytest.approx(1.0, rel=0.05)


def test_a_prompt_in_chunks_has_the_operations_of_the_whole(llama: ModelShape) -> None:
    whole = prefill(llama, 512).operations
    parts = prefill(llama, 200).operations + prefill(llama, 312, 200).operations
    assert parts - whole == pytest.approx(2 * llama.head), "both parts sample a token"


def test_sides_of_the_roofline(llama: ModelShape) -> None:
    h100 = device("h100")
    assert h100.ridge == pytest.approx(295, abs=1)
    assert h100.side(*_both(decode(llama, 1, 1024))) == "memory"
    assert h100.side(*_both(prefill(llama, 4096))) == "compute"
    first = decode_batch_at_ridge(llama, 1, h100.ridge)
    assert first is not None and 250 < first < 500
    assert decode(llama, first, 1).intensity >= h100.ridge > decode(llama, first - 1, 1).intensity
    assert decode_batch_at_ridge(llama, 8192, h100.ridge) is None, "the cache grows with the batch"


def _both(work: Any) -> tuple[float, float]:
    return work.operations, work.bytes


@given(st.integers(0, 50), st.integers(1, 50), st.integers(1, 40))
def test_positions_in_a_window(start: int, tokens: int, window: int) -> None:
    shape = ModelShape("w", 4, 8, 2, 2, 4, 4, 10, 100, 0, 0, 0, kv_windows=((window, 3),), attention_layers=4)
    positions = range(start, start + tokens)
    by_hand = sum((p + 1) + 3 * min(p + 1, window) for p in positions) / 4
    assert shape.attended(start, tokens) == pytest.approx(by_hand)
    assert shape.kv_read(start + tokens) == pytest.approx((start + tokens + 3 * min(start + tokens, window)) / 4)


def test_work_with_and_without_a_cache(llama: ModelShape) -> None:
    lengths = (256, 512)
    cached, anew = (work(llama, 8, lengths) for work in (work_with_cache, work_without_cache))
    assert [g.tokens for g in cached] == [8 + n - 1 for n in lengths]
    assert [g.tokens for g in anew] == [n * 8 + n * (n - 1) // 2 for n in lengths]
    assert growth([g._asdict() for g in cached]) == pytest.approx(1.0, abs=0.05)
    assert growth([g._asdict() for g in anew]) == pytest.approx(2.0, abs=0.1)
    assert work_with_cache(llama, 8, [1])[0] == work_without_cache(llama, 8, [1])[0]


def test_memory_fits() -> None:
    shape = read_shape("llama-3.1-8b")
    fit = memory_fit(shape, 80 * GIB, 0.9)
    assert fit.kv_tokens == (int(80 * GIB * 0.9) - 2 * shape.parameters) // 131_072
    assert fit.requests(8192, 16) == fit.kv_tokens // 16 // 512
    assert memory_fit(read_shape("llama-3.1-70b"), 80 * GIB, 0.9).kv_tokens == 0
    assert memory_fit(shape, 80 * GIB, 0.9, Sizes(weight=1)).weight_bytes == shape.parameters


# --- configs of all kinds --------------------------------------------------------------------------


def config_of(**values: Any) -> Any:
    from transformers import AutoConfig

    small = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 256,
    }
    return AutoConfig.for_model(**(small | values))


def test_latent_attention_keeps_one_vector_a_layer() -> None:
    config = config_of(
        model_type="deepseek_v3",
        num_key_value_heads=4,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=8,
        n_group=2,
        topk_group=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
    )
    shape = shape_of("latent", config, "")
    assert shape.kv_per_token == 4 * (32 + 8)
    assert shape.experts_parameters == 3 * 8 * 3 * 64 * 32, "three layers of eight experts of three matrices"
    assert (shape.qk_dim, shape.v_dim) == (24, 16)


def test_tied_embeddings_count_once_and_windows_are_seen() -> None:
    config = config_of(
        model_type="gemma3_text",
        head_dim=16,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        sliding_window=32,
        tie_word_embeddings=True,
    )
    shape = shape_of("windows", config, "")
    assert shape.kv_windows == ((32, 3),)
    assert shape.head == 100 * 64
    assert shape.parameters == pytest.approx(shape.body + shape.head, rel=0.02), "the rest is norms"


def test_a_folder_and_its_config_file_are_the_same_model(tiny_model: Path) -> None:
    folder, file = read_shape(str(tiny_model)), read_shape(str(tiny_model / "config.json"))
    assert folder.parameters == file.parameters > 0
    assert folder.kv_per_token == 2 * folder.layers * folder.kv_heads * folder.qk_dim


def test_what_is_no_model_is_told(tmp_path: Path) -> None:
    from transformers import AutoConfig

    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}', encoding="utf-8")
    with pytest.raises(ModelError, match=r"llama-3.1-8b"):
        read_shape(str(tmp_path))
    with pytest.raises(ModelError, match="does not exist"):
        read_shape(str(tmp_path / "no-such/config.json"))
    with pytest.raises(ModelError, match="cannot be made a model of"):
        shape_of("wrong", AutoConfig.for_model("vit"), "")


@pytest.mark.parametrize(
    ("meant", "name"),
    [("llama3-8b", "llama-3.1-8b"), ("Qwen2-7B", "qwen2.5-7b"), ("opt13b", "opt-13b"), ("mixtral", "mixtral-8x7b")],
)
def test_a_name_that_is_nearly_known_is_not_asked_for_on_the_hub(
    meant: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoConfig

    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda source: pytest.fail(f"asked for {source}"))
    with pytest.raises(ModelError, match=f"did you mean {name}"):
        read_shape(meant)


def test_other_names_and_names_with_an_owner_are(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoConfig

    asked = []

    def offline(source: str) -> None:
        asked.append(source)
        raise OSError("no network")

    monkeypatch.setattr(AutoConfig, "from_pretrained", offline)
    with pytest.raises(ModelError, match="no network"):
        read_shape("gpt2")
    with pytest.raises(ModelError, match=r"did you mean llama-3\.1-8b.*no network"):
        read_shape("meta-llama/Llama-3.1-8B-Base")
    assert asked == ["gpt2", "meta-llama/Llama-3.1-8B-Base"]


LLAMA = KNOWN["llama-3.1-8b"].config
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


@pytest.mark.parametrize(
    ("quantization", "gb"),
    [
        (GPTQ, 5.73),  # its checkpoints on the hub have 5.73 GB
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head"]}, 9.08),  # 9.08
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 9.08),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "modules_to_not_convert": ["self_attn"]}, 7.71),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": None}}},
                "ignore": ["lm_head", "re:.*mlp"],
            },
            14.72,
        ),
    ],
)
def test_quantised_weights_are_as_large_as_they_are_stored(quantization: dict[str, Any], gb: float) -> None:
    from transformers import AutoConfig

    shape = shape_of("quantised", AutoConfig.for_model(**LLAMA, quantization_config=quantization), "")
    data = anatomy(shape, Question(device=device("H100")))
    assert data["weights"]["bytes"] / 1e9 == pytest.approx(gb, abs=0.01)
    assert data["weights"]["quantization"] == quantization["quant_method"]
    assert data["memory"]["weight_bytes"] == data["weights"]["bytes"]
    assert data["kv_cache"]["bytes_per_token"] == 131_072, "the cache stays in 16 bits"
    plain = anatomy(shape, Question(weight_dtype="bfloat16"))
    assert plain["weights"]["bytes"] == 2 * shape.parameters and plain["weights"]["quantization"] is None
    read = [found["decode"][0]["bytes"] for found in (data, plain)]
    assert plain["weights"]["bytes"] - data["weights"]["bytes"] == pytest.approx(read[1] - read[0], abs=1)


def test_only_experts_are_in_mxfp4() -> None:
    shape = shape_of(
        "experts",
        config_of(
            model_type="gpt_oss",
            num_local_experts=4,
            head_dim=16,
            dtype="bfloat16",
            quantization_config={"quant_method": "mxfp4"},
        ),
        "",
    )
    assert (shape.body_bits, shape.experts_bits) == (16, 4.25)
    sizes = Sizes(2, 2, shape.body_bits / 8, shape.experts_bits / 8)
    others = shape.parameters - shape.experts_parameters
    assert weight_bytes(shape, sizes) == pytest.approx(2 * others + 4.25 / 8 * shape.experts_parameters, abs=1)


def test_a_quantisation_without_bits_needs_a_dtype(tmp_path: Path) -> None:
    config = config_of(model_type="llama", quantization_config={"quant_method": "aqlm"})
    shape = shape_of("unknown", config, "")
    with pytest.raises(ConfigError, match=r"--dtype: is needed.*aqlm"):
        anatomy(shape, Question())
    assert anatomy(shape, Question(weight_dtype="int4"))["weights"]["bytes"] == shape.parameters / 2
    found = read_quantization(config_of(model_type="llama", quantization_config={**GPTQ, "bits": "many"}))
    assert found is not None and found.bits is None


def test_dtypes_are_known_by_name() -> None:
    sizes = {"float64": 8, "bfloat16": 2, "FP16": 2, "fp8_e4m3": 1, "float8_e5m2": 1, "int8": 1, "int4": 0.5}
    assert {name: element_bytes(name) for name in sizes} == sizes
    shape = read_shape("llama-3.1-8b")
    for question, option in (
        (Question(weight_dtype="banana"), "--dtype"),
        (Question(kv_dtype="float18"), "--kv-dtype"),
    ):
        with pytest.raises(ConfigError, match=f"^{option}: is no dtype.*bfloat16"):
            anatomy(shape, question)
    half = anatomy(shape, Question(device=device("H100"), kv_dtype="int4"))
    assert half["kv_cache"]["bytes_per_token"] == 32_768


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": -1},
        {"hidden_size": 0},
        {"max_position_embeddings": 0},
        {"vocab_size": 0},
    ],
)
def test_sizes_that_no_model_has_are_told(wrong: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | wrong), encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json cannot be made a model of"):
        read_shape(str(tmp_path))


def test_layers_that_share_keys_and_values_keep_them_once() -> None:
    from transformers import AutoConfig

    types = ["sliding_attention"] * 4 + ["full_attention"]
    small = {
        "hidden_size": 64,
        "intermediate_size": [128] * 10,
        "num_hidden_layers": 10,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 100,
        "vocab_size_per_layer_input": 100,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 4,
        "layer_types": types * 2,
        "activation_sparsity_pattern": [0.0] * 10,
        "altup_num_inputs": 2,
    }
    shared = shape_of("shares", AutoConfig.for_model("gemma3n_text", **small, num_kv_shared_layers=5), "")
    assert (shared.attention_layers, shared.kv_layers) == (10, 5)
    assert shared.kv_per_token == 5 * 2 * 2 * 16
    assert shared.kv_per_token_multi_head == 2 * shared.kv_per_token
    foreign = shape_of("llama", config_of(model_type="llama", num_kv_shared_layers=2), "")
    assert foreign.kv_layers == foreign.attention_layers == 4, "its architecture knows no such setting"


# --- the command -----------------------------------------------------------------------------------


def test_the_anatomy_of_the_papers_set_up() -> None:
    lengths, name = chosen_lengths(PAPER)
    question = Question(device=device("A100-40G"), lengths=lengths, lengths_name=name)
    data = anatomy(read_shape("opt-13b"), question)
    assert data["memory"]["kv_tokens"] == pytest.approx(published.SLOTS, rel=0.03)
    use = data["kv_memory_use"]
    assert use["max_len"] == 2048 and use["left_out"] == 0
    assert use["mean_prompt_tokens"] == pytest.approx(published.MEAN_PROMPT, rel=0.05)
    assert use["mean_output_tokens"] == pytest.approx(published.MEAN_OUTPUT, rel=0.05)
    assert use["usage"]["paged"]["token"] == pytest.approx(0.963, abs=0.02)
    json.dumps(data)
    assert len(tables(data | {"measured": None})) == 5


@pytest.mark.parametrize("columns", [120, 80, 60])
def test_no_number_of_an_anatomy_is_cut_or_has_an_exponent(columns: int) -> None:
    lengths, name = chosen_lengths(PAPER)
    question = Question(
        device=device("B200"), gpus=128, context=131_072, lengths=lengths[:1000], lengths_name=name, slots=65_536
    )
    data = anatomy(read_shape("llama-3.1-70b"), question) | {"measured": None}
    file = io.StringIO()
    for table in tables(data):
        Console(file=file, width=columns).print(table)
    text = file.getvalue()
    assert "…" not in text and not re.search(r"\de[+-]?\d", text), text
    assert all(len(line) <= columns for line in text.splitlines())
    for heading in ("GFLOP", "KV of it", "FLOP/B", "floor ms", "reserved", "internal", "external", "published"):
        assert heading in text
    assert f"{data['work_without_cache'][-1]['operations'] / 1e9:,.0f}" in text
    assert f"{data['decode'][-1]['bytes'] / 1e9:,.0f}" in text
    assert "1,024,000 GB/s" in " ".join(text.split())


def test_the_figures_of_an_anatomy_have_plain_ticks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    labels: dict[str, list[str]] = {}
    save = Figure.savefig

    def saved(figure: Figure, path: Path, **options: Any) -> None:
        save(figure, path, **options)
        axes = figure.axes[0]
        labels[path.stem] = [t.get_text() for t in (*axes.get_xticklabels(), *axes.get_yticklabels())]

    monkeypatch.setattr(Figure, "savefig", saved)
    data = anatomy(read_shape("llama-3.1-8b"), Question(device=device("H100"))) | {"measured": None}
    plot_anatomy(data, tmp_path)
    assert labels.keys() == {"roofline", "work", "kv-share"}
    for texts in labels.values():
        assert len(texts) > 6
        assert all(re.fullmatch(r"−?[\d,.]+", text) for text in texts), texts


def test_gpus_together_hold_what_one_cannot() -> None:
    question = Question(device=device("H100"), gpus=4)
    data = anatomy(read_shape("llama-3.1-70b"), question)
    assert data["memory"]["kv_tokens"] > 100_000
    assert data["device"]["name"] == "4 x H100" and data["device"]["ridge"] == pytest.approx(DEVICES["h100"].ridge)


def test_devices_from_options() -> None:
    assert chosen_device(None, None, None, None) is None
    given = chosen_device(None, 100.0, 1000.0, None)
    assert given is not None and given.ridge == 100
    changed = chosen_device("h100", None, None, 40.0)
    assert changed is not None and changed.memory_gib == 40 and changed.tflops == 989.4
    with pytest.raises(ConfigError, match="--bandwidth"):
        chosen_device(None, 100.0, None, None)
    with pytest.raises(ConfigError, match="H100"):
        chosen_device("Z9000", None, None, None)
    with pytest.raises(ConfigError, match="--peak-tflops: is needed too"):
        chosen_device(None, None, None, 10.0)


@pytest.mark.parametrize("value", [0.0, -5.0, float("nan"), float("inf"), 1e300])
@pytest.mark.parametrize("option", ["--peak-tflops", "--bandwidth", "--memory"])
def test_what_no_device_has_is_told(option: str, value: float) -> None:
    values = {"--peak-tflops": 100.0, "--bandwidth": 1000.0, "--memory": 80.0} | {option: value}
    for gpu in (None, "H100"):
        with pytest.raises(ConfigError, match=f"^{option}: "):
            chosen_device(gpu, *values.values())


def test_requests_come_again_until_the_memory_is_full(llama: ModelShape) -> None:
    lengths = ((100, 20), (50, 30), (80, 1))
    data = anatomy(llama, Question(lengths=lengths, lengths_name="three", slots=4096, max_len=256))
    use = data["kv_memory_use"]
    assert use["requests"] == 3 and use["times"] == 59, "4 x 4096 tokens of 281 at a time"
    assert use["usage"]["paged"]["token"] > 0.8
    file = io.StringIO()
    for table in tables(data | {"measured": None}):
        Console(file=file, width=200).print(table)
    assert f"they come {use['times']} times" in file.getvalue()
    with pytest.raises(ConfigError, match=r"--slots: .*got 1000000000.*allowed: <= \d+") as told:
        anatomy(llama, Question(lengths=lengths, lengths_name="three", slots=10**9, max_len=256))
    most = int(str(told.value.allowed).removeprefix("<= "))
    assert times_to_fill(lengths, most) * len(lengths) <= MAX_REQUESTS, "what it allows is taken"


def test_lengths_come_from_presets_and_traces(tmp_path: Path) -> None:
    pairs, name = chosen_lengths("chat/8")
    assert len(pairs) == 3000 and name == "chat"
    trace = tmp_path / "trace.csv"
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n0,10,5\n1,20,6\n", encoding="utf-8")
    assert chosen_lengths(str(trace)) == (((10, 5), (20, 6)), "trace.csv")


# --- measured --------------------------------------------------------------------------------------


def step(seconds: float, blocks: int, running: int, shape: StepShape) -> StepRecord:
    return StepRecord("both-0", 0.0, seconds, shape, blocks, running, 0)


def test_the_useful_share_counts_steps_by_their_time() -> None:
    steps = [
        step(1.0, 2, 2, StepShape(decodes=2, decode_context=24)),  # 24 of 32
        step(
            3.0, 4, 2, StepShape(chunks=1, chunk_tokens=30, chunk_context=10, decodes=1, decode_context=16)
        ),  # 56 of 64
        step(9.0, 9, 3, StepShape(decodes=2, decode_context=24)),  # somebody did not advance
    ]
    found = useful_share(steps, 16)
    assert found["share"] == pytest.approx((24 + 3 * 56) / (32 + 3 * 64))
    assert (found["steps"], found["steps_left_out"]) == (2, 1)
    assert useful_share([], 16)["share"] is None


def test_measuring_an_engine(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = parse_config(
        {
            "launcher": "local",
            "model": {"source": str(tiny_model), "dtype": "float32"},
            "pools": {"both": {"kv_blocks": 96}},
            "engine": {"max_batch_tokens": 64, "max_batch_requests": 8},
        }
    )
    data = run_anatomy(str(tiny_model), Question(context=64), measured=config, folder=tmp_path, as_json=True)
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "anatomy.json").read_text(encoding="utf-8"))
    measured = data["measured"]
    shape = read_shape(str(tiny_model))
    for kind in ("prefill", "decode"):
        for entry in measured["utilization"][kind]:
            assert 0 < entry["of_peak"] < 2 and 0 < entry["of_bandwidth"] < 20 and entry["ms"] > 0
    shares = measured["kv_share_of_bytes"]
    assert [entry["batch"] for entry in shares] == [1, 2, 4, 8]
    assert all(one["share"] < two["share"] for one, two in pairwise(shares)), "weights are read once, the cache by each"
    assert shares[0]["kv_bytes"] == 65 * shape.kv_per_token * 4
    with_cache, without = measured["work_with_cache"], measured["work_without_cache"]
    assert [e["generated"] for e in with_cache] == [e["generated"] for e in without] == [4, 8, 16, 32, 64]
    assert with_cache[-1]["tokens"] == 8 + 63 and without[-1]["tokens"] == 64 * 8 + 64 * 63 // 2
    assert all(one["seconds"] < two["seconds"] for entries in (with_cache, without) for one, two in pairwise(entries))
    live = measured["kv_useful_share"]
    assert live["requests"] == 24 and live["steps"] > 0 and 0.5 < live["share"] <= 1
    assert {file.name for file in tmp_path.iterdir()} == {
        "anatomy.json",
        "kv-share.png",
        "utilization.png",
        "work.png",
    }
    assert len(tables(data)) == 6


def test_measuring_without_a_live_run_says_so(tiny_model: Path) -> None:
    config = parse_config(
        {
            "model": {"source": str(tiny_model), "dtype": "float32"},
            "pools": {"both": {"kv_blocks": 32}},
            "engine": {"max_batch_tokens": 32, "max_batch_requests": 2},
        }
    )
    assert measure(config, read_shape(str(tiny_model)), context=32, live=False)["kv_useful_share"] is None


def test_a_step_of_many_is_the_sum_of_its_items(llama: ModelShape) -> None:
    items = [(100, 1), (50, 1), (0, 20), (30, 10)]
    together = step_work(llama, items)
    apart = [step_work(llama, [item]) for item in items]
    assert together.operations == pytest.approx(sum(work.operations for work in apart))
    assert together.kv_bytes == pytest.approx(sum(work.kv_bytes for work in apart))
    assert together.weight_bytes == apart[0].weight_bytes
