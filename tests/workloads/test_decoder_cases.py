"""The shapes of a decoder's step: those of public models, by their sizes; splits; what is refused and in which words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from emmy.errors import UsageError
from emmy.ir.ops import parse_op
from emmy.ir.ops.op import PARSERS
from emmy.workloads import DecoderCase, from_config, load, op_texts
from tests.workloads.decoders import GEMMA3_4B, GEMMA4_12B, LLAMA3_8B, MISTRAL_7B, QWEN3_4B


def shapes(config: dict[str, object], tp: int = 1) -> dict[str, tuple[str, int]]:
    """What the op of each case says after its kind, at one row, and how often a step runs it."""
    found = {}
    for c in from_config(config, (1,), tp):
        name = c.id.partition(".m1")[0]
        found[name] = (c.text.partition(":")[2], c.count)
    return found


def test_llama3_8b_has_its_published_shapes_and_no_head_norms() -> None:
    s = shapes(LLAMA3_8B)
    assert s["qkv_proj"] == ("1x6144x4096:bf16:nk", 32)
    assert s["q_proj"] == s["o_proj"] == ("1x4096x4096:bf16:nk", 32)
    assert s["kv_proj"] == ("1x1024x4096:bf16:nk", 64)
    assert s["gate_up_proj"] == ("1x28672x4096:bf16:nk", 32)
    assert s["swiglu"] == ("1x14336x4096:bf16:nk", 32)
    assert s["down_proj"] == ("1x4096x14336:bf16:nk", 32)
    assert s["lm_head"] == ("1x128256x4096:bf16:nk", 1)
    assert s["rms_norm"] == ("1x4096:bf16", 2 * 32 + 1)
    assert s["attention"] == ("32x1x1x128:bf16:causal,kv8", 32)
    assert not {"q_norm", "k_norm", "geglu"} & set(s)


def test_qwen3_has_heads_of_its_own_size_and_norms_of_them() -> None:
    s = shapes(QWEN3_4B)
    assert s["qkv_proj"] == (f"1x{(32 + 2 * 8) * 128}x2560:bf16:nk", 36)
    assert s["o_proj"] == ("1x2560x4096:bf16:nk", 36)
    assert (s["q_norm"], s["k_norm"]) == (("32x128:bf16", 36), ("8x128:bf16", 36))


def test_mistral_attends_to_a_window() -> None:
    assert shapes(MISTRAL_7B)["attention"] == ("32x1x1x128:bf16:causal,window4096,kv8", 32)


def test_gemma3_is_read_from_its_text_config_with_what_its_class_fills_in() -> None:
    s = shapes(GEMMA3_4B)
    assert s["qkv_proj"] == ("1x4096x2560:bf16:nk", 34)  # local and global layers have the same sizes
    assert (s["attention.local"][1], s["attention.global"][1]) == (29, 5)
    assert s["geglu"] == ("1x10240x2560:bf16:nk", 34)
    assert s["rms_norm"] == ("1x2560:bf16", 4 * 34 + 1)
    assert s["lm_head"][0] == "1x262208x2560:bf16:nk"


def test_gemma4s_global_layers_have_other_heads_and_no_projection_of_values() -> None:
    s = shapes(GEMMA4_12B)
    assert s["qkv_proj.local"] == ("1x8192x3840:bf16:nk", 40)
    assert s["qkv_proj.global"] == ("1x8704x3840:bf16:nk", 8)
    assert s["kv_proj.local"] == ("1x2048x3840:bf16:nk", 80)
    assert s["k_proj.global"] == ("1x512x3840:bf16:nk", 8)
    assert s["o_proj.local"][0] == "1x3840x4096:bf16:nk"
    assert s["o_proj.global"] == ("1x3840x8192:bf16:nk", 8)
    assert s["k_norm.global"] == ("1x512:bf16", 8)
    assert s["attention.global"] == ("16x1x1x512:bf16:causal,kv1", 8)


def test_gemma4s_matmuls_are_those_of_the_catalogue() -> None:
    def sizes(texts: tuple[str, ...]) -> set[str]:
        return {t.split(":")[1].split("x", 1)[1] for t in texts if t.startswith("matmul")}

    ours = sizes(tuple(c.text for c in from_config(GEMMA4_12B, (1,)) if c.form != "twice"))
    assert ours == sizes(op_texts("@gemma4-12b"))


def test_a_split_divides_columns_of_some_weights_and_the_summed_axis_of_others() -> None:
    whole, half = shapes(LLAMA3_8B), shapes(LLAMA3_8B, 2)
    assert half["qkv_proj"][0] == "1x3072x4096:bf16:nk"
    assert half["gate_up_proj"][0] == "1x14336x4096:bf16:nk"
    assert half["o_proj"][0] == "1x4096x2048:bf16:nk"
    assert half["down_proj"][0] == "1x4096x7168:bf16:nk"
    assert half["lm_head"][0] == "1x64128x4096:bf16:nk"
    assert half["rms_norm"] == whole["rms_norm"]


def test_fewer_key_and_value_heads_than_devices_are_repeated() -> None:
    s = shapes(GEMMA4_12B, 4)
    assert s["k_proj.global"] == ("1x512x3840:bf16:nk", 8)
    assert s["kv_proj.local"][0] == "1x512x3840:bf16:nk"


def test_the_work_of_merged_projections_is_that_of_separate_ones() -> None:
    cases = [c for c in from_config(GEMMA4_12B, (4,), 2) if c.kind == "matmul"]
    for part in {c.part for c in cases if c.form}:
        flops = {
            form: sum(c.count * parse_op(c.text).work().flops for c in cases if (c.part, c.form) == (part, form))
            for form in ("merged", "separate")
        }
        assert flops["merged"] == flops["separate"], part


def test_every_case_is_an_op_or_of_a_kind_without_a_parser() -> None:
    for c in from_config(QWEN3_4B, (1, (1, 64)), dtype="f16"):
        assert isinstance(c, DecoderCase)
        assert (c.op_text() is not None) == (c.kind in PARSERS), c
        if (text := c.op_text()) is not None:
            assert parse_op(text).key == text


def test_attention_reads_the_context_as_far_as_its_window_reaches() -> None:
    texts = {c.id: c.text for c in from_config(GEMMA4_12B, (4, (1, 8)), context=5000)}
    assert texts["attention.local.m4"] == "attention:16x4x1027x256:bf16:causal,window1024,kv8"
    assert texts["attention.global.m4"] == "attention:16x4x5004x512:bf16:causal,kv1"
    assert "?" in texts["attention.global.m1..8"]  # an op has one open size for queries and keys
    texts = {c.id: c.text for c in from_config(GEMMA4_12B, ((1, 8),))}
    assert texts["attention.global.m1..8"] == "attention:16xm(1..8)xm(1..8)x512:bf16:causal,kv1"


def test_a_bias_of_the_config_is_an_epilogue_and_stands_in_the_way_of_a_gated_pair() -> None:
    s = shapes({**LLAMA3_8B, "attention_bias": True, "mlp_bias": True})
    assert s["qkv_proj"][0].endswith(":nk,bias")
    assert s["down_proj"][0].endswith(":nk,bias")
    assert not {"swiglu", "norm_qkv", "norm_gate_up"} & set(s)


# ---------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "mixtral"}, "model_type is 'mixtral'; dense decoders of .*llama"),
        ({"hidden_size": None}, "the field hidden_size is missing.* Add it"),
        ({"hidden_size": "4096"}, "hidden_size is '4096'; a whole number"),
        (
            {"hidden_size": 4100},
            "head_dim is missing, and hidden_size 4100 is not a multiple of num_attention_heads 32",
        ),
        ({"num_key_value_heads": 5}, "32 query heads are not a multiple of 5"),
        ({"num_local_experts": 8}, "num_local_experts is 8: experts"),
        ({"text_config": [1]}, r"text_config is '\[1\]'; an object"),
        ({"hidden_act": "relu"}, "hidden_act is 'relu'; gelu_pytorch_tanh, silu"),
        ({"layer_types": ["full_attention"] * 31}, "lists 31 layers, num_hidden_layers is 32"),
        ({"layer_types": ["linear_attention"] * 32}, "layer_types is .*linear_attention"),
        ({"torch_dtype": "float8"}, "dtype is float8; one of float16"),
        ({"dtype": "float16"}, "dtype is float16 and bfloat16"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
    ],
)
def test_a_field_that_is_missing_or_contradicts_is_named(change: dict[str, object], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        from_config({**LLAMA3_8B, **change})


def test_gemma4_without_its_global_fields_says_which_to_add() -> None:
    config = {k: v for k, v in GEMMA4_12B.items() if k != "global_head_dim"}
    with pytest.raises(
        UsageError, match=r"global_head_dim is missing.*Add global_head_dim and num_global_key_value_heads"
    ):
        from_config(config)


@pytest.mark.parametrize(
    ("tp", "says"),
    [
        (0, "over 0 devices"),
        (3, r"8 key and value heads .* among 3 devices"),
        (64, r"32 is not a multiple of tp=64; .* 1, 2, 4, 8"),
    ],
)
def test_a_split_that_does_not_divide_says_which_would(tp: int, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        from_config(LLAMA3_8B, (1,), tp)


@pytest.mark.parametrize("width", [0, (8, 4), (0, 4)])
def test_a_width_must_be_a_number_of_rows(width: int | tuple[int, int]) -> None:
    with pytest.raises(UsageError, match=r"a width is .*is allowed"):
        from_config(LLAMA3_8B, (width,))


def test_a_model_without_a_dtype_asks_for_one() -> None:
    config = {k: v for k, v in LLAMA3_8B.items() if k != "torch_dtype"}
    with pytest.raises(UsageError, match=":dtype=f16"):
        from_config(config)
    assert from_config(config, (1,), dtype="f16")[0].text.endswith("f16:nk")


# ---------------------------------------------------------------- as a set
def test_a_set_names_file_or_folder_widths_split_dtype_and_a_pattern(tmp_path: Path) -> None:
    folder = tmp_path / "a:model"  # a colon in a path is no option
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA3_8B))
    cases = load(f"@config:{folder}:widths=1,2..8:tp=2:dtype=f32:only=qkv*")
    assert [c.id for c in cases] == ["qkv_proj.m1.tp2", "qkv_proj.m2..8.tp2"]
    assert op_texts(f"@config:{folder / 'config.json'}:widths=3:only=o_*") == ("matmul:3x4096x4096:bf16:nk",)
    both = load(f"@config:{folder}:widths=1:only=o_*,lm_*")
    assert [c.id for c in both] == ["o_proj.m1", "lm_head.m1"]
    served = load(f"@config:{folder}:widths=1..64:form=server")
    assert [c.id.split(".")[0] for c in served] == [
        "qkv_proj",
        "o_proj",
        "gate_up_proj",
        "swiglu",
        "down_proj",
        "lm_head",
    ]


def test_a_server_has_keys_that_are_the_values_too_in_its_merged_weight_once_or_twice() -> None:
    cases = {c.id: c for c in from_config(GEMMA4_12B, ((1, 64),), dtype="f32") if c.is_served}
    assert cases["qkv_proj.global.m1..64"].text == "matmul:m(1..64)x8704x3840:f32:nk"
    assert cases["twice_qkv_proj.global.m1..64"].text == "matmul:m(1..64)x9216x3840:f32:nk"
    assert "twice_qkv_proj.local.m1..64" not in cases


@pytest.mark.parametrize(
    ("rest", "says"),
    [
        (":widths=eight", "the width 'eight' is neither"),
        (":tp=two", "tp is 'two'"),
        (":context=-1", "context is '-1'"),
        (":dtype=int8", "dtype is 'int8'; allowed are f32"),
        (":widths=1:widths=2", "has not the form"),
        (":only=qvk_proj*", "Close: qkv_proj"),
        (":form=merged", "form is 'merged'; allowed is server"),
        (":server", r"If its end was meant as options, they are @config:PATH\[:widths"),
    ],
)
def test_an_option_that_cannot_be_read_is_named(tmp_path: Path, rest: str, says: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA3_8B))
    with pytest.raises(UsageError, match=says):
        load(f"@config:{path}{rest}")


def test_a_file_that_is_not_there_or_no_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"No such file.*Name a model's config\.json"):
        load(f"@config:{tmp_path / 'none.json'}")
    path = tmp_path / "config.json"
    path.write_text("[1")
    with pytest.raises(UsageError, match="is no JSON"):
        load(f"@config:{path}")


def test_a_servers_ops_are_merged_products_and_norms_between_blocks_open_and_of_both_types() -> None:
    texts = op_texts("@gemma4-12b-server")
    sizes = ("8192x3840", "3840x4096", "8704x3840", "9216x3840", "3840x8192", "30720x3840", "3840x15360", "262144x3840")
    wanted = {f"matmul:m(1..8192)x{s}:{d}:nk" for s in sizes for d in ("f16", "bf16")}
    attention = {x for x in texts if x.startswith("served_attention:")}
    wanted |= {f"geglu:m(1..8192)x15360x3840:{d}:nk" for d in ("f16", "bf16")}
    wanted |= {f"norm_add_norm:m(1..8192)x3840:{words}" for words in ("f16", "f16:scale", "bf16", "bf16:scale")}
    assert wanted == set(texts) - attention
    assert len(attention) == 8 and all("scale1.0,pcjgd" in x for x in attention)
