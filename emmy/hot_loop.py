"""The loop of a library that does most of its arithmetic, as assembly. Reads what objdump prints; runs nothing of it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

from emmy.errors import CompileError

_FUNCTION = re.compile(r"^[0-9a-f]+ <([^>]+)>:$")
_LINE = re.compile(r"^\s*([0-9a-f]+):\t(.*)$")
_BRANCH = re.compile(r"^(?:j\w+|b(?:\.\w+)?|cbn?z|tbn?z)\s.*?\b([0-9a-f]+) <")
_ARITHMETIC = re.compile(r"^(?:v?f\w*m(?:add|la|ul)\w*|vfn?madd\w*|v?mul[sp]s|v?add[sp]s|fmla|fmul|fadd)\b")


@dataclass(frozen=True, slots=True)
class Loop:
    """Consecutive instructions of `function` that a branch at their end repeats."""

    function: str
    lines: tuple[str, ...]

    @property
    def arithmetic(self) -> int:
        return sum(_ARITHMETIC.match(line) is not None for line in self.lines)


def hot_loop(library: Path) -> Loop | None:
    """The innermost loop with the most arithmetic instructions; None when the library has none.

    Raises CompileError without objdump, which comes with gcc's binutils.
    """
    command = ["objdump", "-d", "--no-show-raw-insn", "-w", str(library)]
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise CompileError(f"objdump does not run: {e}. It comes with gcc (Debian: apt install binutils)") from e
    return max(loops(text), key=lambda loop: (loop.arithmetic, -len(loop.lines)), default=None)


def loops(disassembly: str) -> list[Loop]:
    """Every innermost loop: from a branch's target back to the branch, with no other such stretch inside."""
    found: list[Loop] = []
    name, lines = "", list[tuple[int, str]]()
    for line in [*disassembly.splitlines(), "0 <end>:"]:
        if start := _FUNCTION.match(line):
            found += _of_function(name, lines)
            name, lines = start[1], []
        elif hit := _LINE.match(line):
            lines.append((int(hit[1], 16), re.sub(r"\s+#.*|\s+$", "", hit[2]).expandtabs()))
    return found


def _of_function(name: str, lines: list[tuple[int, str]]) -> list[Loop]:
    at = {address: i for i, (address, _) in enumerate(lines)}
    spans = []
    for i, (_, text) in enumerate(lines):
        branch = _BRANCH.match(text)
        first = at.get(int(branch[1], 16)) if branch else None
        if first is not None and first <= i:
            spans.append((first, i))
    inner = [s for s in spans if not any(t != s and s[0] <= t[0] and t[1] <= s[1] for t in spans)]
    return [Loop(name, tuple(text for _, text in lines[a : b + 1])) for a, b in inner]
