"""Text that calls a helper with arguments of its types, for compiling. What it computes means nothing."""

from __future__ import annotations

from emmy.codegen.ptx import Helper

_CONSTANT = {"cp_async_wait": "1", "bulk_wait": "1", "bulk_wait_read": "1", "wgmma_wait": "1"}


def call(h: Helper) -> str:
    """A statement; `g` is a pointer, `x` an int, `f` a float and `map` a tensor map."""
    returns, rest = h.signature.split(" ", 1)
    name, parameters = rest.rstrip(")").split("(")
    before, arguments, after = [], [], []
    for i, p in enumerate(p for p in parameters.split(", ") if p):
        kind, pname = p.rsplit(" ", 1)
        if kind.endswith("*") and kind.removeprefix("const ") in ("u16*", "u32*", "float*") and pname != "p":
            element = kind.removeprefix("const ").rstrip("*")
            before.append(f"{element} v{i}[128]; for (int j = 0; j < 128; ++j) v{i}[j] = (({element}*)g)[j];")
            arguments.append(f"v{i}")
            if not kind.startswith("const"):
                after.append(f"for (int j = 0; j < 128; ++j) (({element}*)g)[j] = v{i}[j];")
        elif kind == "const emmy_tensormap*":
            arguments.append("&map")
        elif kind.endswith("&"):
            before.append(f"{kind[:-1]} v{i} = ({kind[:-1]})x;")
            arguments.append(f"v{i}")
        else:
            arguments.append("f" if kind == "float" else f"({kind})g" if kind.endswith("*") else f"({kind})x")
    template = f"<{_CONSTANT.get(h.name, '64')}>" if h.template else ""
    result = "" if returns == "void" else f"*({returns}*)g = "
    return f"{{ {' '.join(before)} {result}emmy_{name}{template}({', '.join(arguments)}); {' '.join(after)} }}"


def kernel(calls: str) -> str:
    return f"EMMY_KERNEL(128, 1) k(EMMY_TENSORMAP(map), void* g, int x, float f) {{\n{calls}\n}}"
