"""The text of `lazy.explain()`."""

from __future__ import annotations

from functionalize.deferral.mode import LazyMode
from functionalize.deferral.runs import Kind, Runs

_SHOWN = 20


def report(mode: LazyMode, runs: Runs, enabled: bool, refused: str | None) -> str:
    """What waited, who looked, and what ran, one line each."""
    if not enabled:
        return "lazy is switched off (enabled=False): every op ran at once"
    lines = [f"{mode.waited} ops waited; {runs.compiles} programs were made"]
    if refused is not None:
        lines.append(f"a block was entered {refused}, and did nothing there")
    looked = mode.looked.most_common(_SHOWN)
    lines += [f"looked {count} times: {what}" for what, count in looked]
    kinds = runs.kinds()
    lines += [_line(kind) for kind in kinds[-_SHOWN:]]
    return "\n".join(lines)


def _line(kind: Kind) -> str:
    how = f"{kind.replays} by its program"
    if kind.refused is not None:
        how = f"no program: {kind.refused}"
    first = f"kind {kind.number}: {kind.ops} ops {kind.line}"
    return f"{first}\n    {kind.runs} runs, {how}; {kind.differs}"
