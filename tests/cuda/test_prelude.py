"""The text in front of a kernel: what is in it, what is not, and what it refuses."""

from __future__ import annotations

import re

import pytest

from emmy.codegen.ptx import ARCHS, HELPERS, helper, prelude, twins, used, wgmma_name
from emmy.errors import CompileError


def test_a_prelude_holds_the_helpers_a_kernel_uses_and_no_others() -> None:
    text = prelude(used("emmy_ldmatrix_x4(r, a); emmy_promote_f16(d, h);"), "sm_80")
    assert re.findall(r"EMMY_DEV \w+ (emmy_\w+)\(", text) == ["emmy_ldmatrix_x4", "emmy_unpack_f16", "emmy_promote_f16"]


def test_what_a_source_calls_is_the_same_with_its_prelude_in_front() -> None:
    kernel = (
        "EMMY_DEV void emmy_mine() {}\nEMMY_KERNEL(32, 1) k(EMMY_TENSORMAP(m)) { emmy_mine(); emmy_promote_f16(d, h); }"
    )
    assert used(kernel) == used(prelude(used(kernel), "sm_80") + kernel) == ("promote_f16",)


@pytest.mark.parametrize(("name", "arch"), [("stmatrix_x4", "sm_89"), (wgmma_name(64, "f16", "smem"), "sm_120a")])
def test_a_helper_that_an_architecture_lacks_is_refused_by_name(name: str, arch: str) -> None:
    with pytest.raises(CompileError, match=f"emmy_{name} .* does not exist on {arch}; it needs one of sm_90a"):
        prelude([name], arch)


def test_an_architecture_that_is_not_supported_is_refused() -> None:
    with pytest.raises(CompileError, match=r"'sm_70' is not supported\. Supported are sm_80"):
        prelude([], "sm_70")


@pytest.mark.parametrize("name", ["wgmma_n12_f16_ss", "wgmma_n264_f16_ss", "wgmma_n8_f16_rs_ta", "ldmatrix_x3", ""])
def test_a_name_that_is_no_helper_is_refused(name: str) -> None:
    with pytest.raises(CompileError, match="there is no helper"):
        helper(name)


def test_both_bodies_of_a_helper_have_the_same_signature() -> None:
    for h in HELPERS.values():
        cuda, emulated = h.cuda_text.split(" {\n")[0], h.emu_text.split(" {\n")[0]
        assert emulated.replace(", EMMY_SITE", "").replace("EMMY_SITE", "") == cuda
        assert h.section


def test_only_helpers_hold_inline_assembly() -> None:
    for h in HELPERS.values():
        assert "asm" not in h.emu_text
    assert "asm" not in prelude([], ARCHS[0])
    assert twins([]).strip() == ""
